// Gradients of functions of rows and of elements, registered for autograd. A formula in Python
// costs tens of microseconds per call, which is more than the work on a small tensor.
//
// Derivatives without a defined order are refused in Python (ops/derivatives.py): tangents and
// torch.func by `isobit::check_derivatives`, second order by the formulas of the gradients'
// operators, which Python registers.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace isobit {

// Named, because strict mode recognises the nodes of the graph by these names (see
// isobit/integrations/transformers/own_operators.py).
namespace derivatives {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An operator's public name, the signatures of its torch operators, and what its gradient needs.
struct Softmax {
  static constexpr const char *name = "softmax", *gradient = "softmax_backward";
  using Forward = Tensor(const Tensor&);
  using Backward = Tensor(const Tensor&, const Tensor&);
  static constexpr bool saves_output = true;
};
struct LogSoftmax : Softmax {
  static constexpr const char *name = "log_softmax", *gradient = "log_softmax_backward";
};
struct Silu : Softmax {
  static constexpr const char *name = "silu", *gradient = "silu_backward";
  static constexpr bool saves_output = false;
};
struct Gelu {
  static constexpr const char *name = "gelu", *gradient = "gelu_backward";
  using Forward = Tensor(const Tensor&, bool);
  using Backward = Tensor(const Tensor&, const Tensor&, bool);
};
struct Swiglu {
  static constexpr const char *name = "swiglu", *gradient = "swiglu_backward";
  using Forward = Tensor(const Tensor&, const Tensor&);
  using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&);
};

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(c10::str("isobit::", name).c_str(), "")
      .typed<Signature>();
}

// Calls the operator's kernel; modes of torch that are below autograd see the call.
template <class Operator, class... Args>
Tensor call_forward(const Args&... args) {
  static const auto op = find<typename Operator::Forward>(Operator::name);
  at::AutoDispatchBelowAutograd guard;
  return op.call(args...);
}

bool has_tangent(bool) { return false; }
bool has_tangent(const Tensor& t) { return t._fw_grad(0).defined(); }
bool requires_grad(bool) { return false; }
bool requires_grad(const Tensor& t) { return t.requires_grad(); }

bool in_torch_func() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         included.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether Python has to check a call: torch.func's tensors hide tangents.
template <class... Args>
bool needs_check(const Args&... args) {
  return in_torch_func() || (has_tangent(args) || ...);
}

// Calls the operator of the gradient. Its formula, in Python, serves only to refuse derivatives.
template <class Operator, class... Args>
auto call_backward(const Args&... args) {
  static const auto op = find<typename Operator::Backward>(Operator::gradient);
  if (at::GradMode::is_enabled() || needs_check(args...)) return op.call(args...);
  at::AutoDispatchBelowAutograd guard;
  return op.call(args...);
}

// A node of the graph. A formula reads only what it saved, so compiled autograd may trace it.
template <class Operator>
struct Gradient : torch::autograd::Function<Gradient<Operator>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor y = call_forward<Operator>(x);
    ctx->save_for_backward({Operator::saves_output ? y : x});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {call_backward<Operator>(grads[0], ctx->get_saved_variables()[0])};
  }
};

template <>
struct Gradient<Gelu> : torch::autograd::Function<Gradient<Gelu>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, bool tanh) {
    ctx->save_for_backward({x});
    ctx->saved_data["tanh"] = tanh;
    return call_forward<Gelu>(x, tanh);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool tanh = ctx->saved_data["tanh"].toBool();
    return {call_backward<Gelu>(grads[0], ctx->get_saved_variables()[0], tanh), Tensor()};
  }
};

template <>
struct Gradient<Swiglu> : torch::autograd::Function<Gradient<Swiglu>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& up) {
    ctx->save_for_backward({gate, up});
    return call_forward<Swiglu>(gate, up);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dgate, dup] = call_backward<Swiglu>(grads[0], saved[0], saved[1]);
    return {dgate, dup};
  }
};

void add_tensor(bool, std::vector<Tensor>&) {}
void add_tensor(const Tensor& t, std::vector<Tensor>& tensors) { tensors.push_back(t); }

// The kernel of an operator for autograd.
template <class Operator, class... Args>
Tensor differentiate(Args... args) {
  if (needs_check(args...)) {
    std::vector<Tensor> tensors;
    (add_tensor(args, tensors), ...);
    find<void(c10::string_view, at::TensorList)>("check_derivatives").call(Operator::name, tensors);
  }
  if (at::GradMode::is_enabled() && (requires_grad(args) || ...))
    return Gradient<Operator>::apply(args...);
  return call_forward<Operator>(args...);
}

}  // namespace derivatives

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("check_derivatives(str public, Tensor[] tensors) -> ()");
}

TORCH_LIBRARY_IMPL(isobit, Autograd, m) {
  using namespace derivatives;
  m.impl("softmax", &differentiate<Softmax, const Tensor&>);
  m.impl("log_softmax", &differentiate<LogSoftmax, const Tensor&>);
  m.impl("silu", &differentiate<Silu, const Tensor&>);
  m.impl("gelu", &differentiate<Gelu, const Tensor&, bool>);
  m.impl("swiglu", &differentiate<Swiglu, const Tensor&, const Tensor&>);
}

}  // namespace isobit
