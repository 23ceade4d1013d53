// Gradients of functions of rows and of elements, registered for autograd. A formula in Python
// costs tens of microseconds per call, which is more than the work on a small tensor.
//
// Derivatives without a defined order are refused in Python (ops/derivatives.py): tangents and
// torch.func by `isobit::check_derivatives`, second order by the formulas of the gradients'
// operators, which Python registers.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

namespace isobit {

// Named, because strict mode recognises the nodes of the graph by these names (see
// isobit/integrations/transformers/operator_table.py).
namespace derivatives {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

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
struct Rotary {
  static constexpr const char *name = "rotary", *gradient = "rotary_backward";
  using Forward = Tensor(const Tensor&, const Tensor&, const Tensor&);
  using Backward = Forward;
};
struct Embedding {
  static constexpr const char *name = "embedding", *gradient = "embedding_weight_grad";
  using Forward = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t);
  using Backward = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, int64_t,
                          int64_t);
};
// The forwards of norms return the result first, and then statistics of rows, without gradients.
struct RmsNorm {
  static constexpr const char *name = "rms_norm", *gradient = "rms_norm_backward";
  using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, double,
                                             const OptionalTensor&, bool, int64_t);
  using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, const OptionalTensor&, bool, int64_t);
};
struct LayerNorm {
  static constexpr const char *name = "layer_norm", *gradient = "layer_norm_backward";
  using Results = std::tuple<Tensor, Tensor, Tensor>;
  using Forward = Results(const Tensor&, const Tensor&, const OptionalTensor&, double,
                          const OptionalTensor&, int64_t);
  using Backward = Results(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const OptionalTensor&, int64_t);
};

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(c10::str("isobit::", name).c_str(), "")
      .typed<Signature>();
}

// Calls the operator's kernel; modes of torch that are below autograd see the call.
template <class Operator, class... Args>
auto call_forward(const Args&... args) {
  static const auto op = find<typename Operator::Forward>(Operator::name);
  at::AutoDispatchBelowAutograd guard;
  return op.call(args...);
}

template <class T>
bool has_tangent(const T&) {
  return false;
}
bool has_tangent(const Tensor& t) { return t._fw_grad(0).defined(); }
bool has_tangent(const OptionalTensor& t) { return t && has_tangent(*t); }
template <class T>
bool requires_grad(const T&) {
  return false;
}
bool requires_grad(const Tensor& t) { return t.requires_grad(); }
bool requires_grad(const OptionalTensor& t) { return t && requires_grad(*t); }

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

template <>
struct Gradient<Rotary> : torch::autograd::Function<Gradient<Rotary>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos,
                        const Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return call_forward<Rotary>(x, cos, sin);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {call_backward<Rotary>(grads[0], saved[0], saved[1]), Tensor(), Tensor()};
  }
};

// Saves tensors, and after them the samples of the call; see [Note: spans and of] in samples.h.
void save(AutogradContext* ctx, variable_list tensors, const OptionalTensor& spans, int64_t of) {
  if (spans) tensors.push_back(*spans);
  ctx->save_for_backward(std::move(tensors));
  ctx->saved_data["of"] = of;
}
// The spans that were saved after `count` tensors.
OptionalTensor spans_after(size_t count, const variable_list& saved) {
  return saved.size() > count ? OptionalTensor(saved[count]) : OptionalTensor();
}

template <>
struct Gradient<Embedding> : torch::autograd::Function<Gradient<Embedding>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& ids, const Tensor& weight,
                        const OptionalTensor& spans, int64_t padding, int64_t of) {
    save(ctx, {ids}, spans, of);
    ctx->saved_data["vocabulary"] = weight.sym_size(0).guard_int(__FILE__, __LINE__);
    ctx->saved_data["padding"] = padding;
    return call_forward<Embedding>(ids, weight, spans, padding, of);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto& known = ctx->saved_data;
    const Tensor dweight = call_backward<Embedding>(grads[0], saved[0], spans_after(1, saved),
                                                    known["vocabulary"].toInt(),
                                                    known["padding"].toInt(), known["of"].toInt());
    return {Tensor(), dweight, Tensor(), Tensor(), Tensor()};
  }
};

// A norm's statistics leave the node through `results`, because outputs of a node have gradients.
template <>
struct Gradient<RmsNorm> : torch::autograd::Function<Gradient<RmsNorm>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps,
                        const OptionalTensor& spans, bool heads, int64_t of,
                        std::tuple<Tensor, Tensor>* results) {
    *results = call_forward<RmsNorm>(x, weight, eps, spans, heads, of);
    save(ctx, {x, weight, std::get<1>(*results)}, spans, of);
    ctx->saved_data["heads"] = heads;
    return std::get<0>(*results);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool heads = ctx->saved_data["heads"].toBool();
    auto [dx, dweight] =
        call_backward<RmsNorm>(grads[0], saved[0], saved[1], saved[2], spans_after(3, saved), heads,
                               ctx->saved_data["of"].toInt());
    return {dx, dweight, Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

template <>
struct Gradient<LayerNorm> : torch::autograd::Function<Gradient<LayerNorm>> {
  static constexpr bool is_traceable = true;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, double eps, const OptionalTensor& spans,
                        int64_t of, LayerNorm::Results* results) {
    *results = call_forward<LayerNorm>(x, weight, bias, eps, spans, of);
    save(ctx, {x, weight, std::get<1>(*results), std::get<2>(*results)}, spans, of);
    ctx->saved_data["biased"] = bias.has_value();
    return std::get<0>(*results);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight, dbias] =
        call_backward<LayerNorm>(grads[0], saved[0], saved[1], saved[2], saved[3],
                                 spans_after(4, saved), ctx->saved_data["of"].toInt());
    if (!ctx->saved_data["biased"].toBool()) dbias = Tensor();
    return {dx, dweight, dbias, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

template <class T>
void add_tensor(const T&, std::vector<Tensor>&) {}
void add_tensor(const Tensor& t, std::vector<Tensor>& tensors) { tensors.push_back(t); }
void add_tensor(const OptionalTensor& t, std::vector<Tensor>& tensors) {
  if (t) tensors.push_back(*t);
}

// Applies the node of a call, and returns what the operator returns.
template <class Operator, class... Args>
auto apply_gradient(const Args&... args) {
  using Results = decltype(call_forward<Operator>(args...));
  if constexpr (std::is_same_v<Results, Tensor>) {
    return Gradient<Operator>::apply(args...);
  } else {
    Results results;
    std::get<0>(results) = Gradient<Operator>::apply(args..., &results);
    return results;
  }
}

// The kernel of an operator for autograd.
template <class Operator, class... Args>
auto differentiate(Args... args) {
  if (needs_check(args...)) {
    std::vector<Tensor> tensors;
    (add_tensor(args, tensors), ...);
    find<void(c10::string_view, at::TensorList)>("check_derivatives").call(Operator::name, tensors);
  }
  if (at::GradMode::is_enabled() && (requires_grad(args) || ...))
    return apply_gradient<Operator>(args...);
  return call_forward<Operator>(args...);
}

}  // namespace derivatives

// Registers the formulas, unless the process runs another minor version of torch than the one this
// was compiled for: the layout of autograd's nodes may differ there, and Python has the same
// formulas. Symbols of torch::autograd are weak in this file (setup.py), so that the library loads
// without them.
bool register_gradients(c10::string_view running) {
  using namespace derivatives;
  const std::string compiled = c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR, ".");
  if (running.substr(0, compiled.size()) != compiled) return false;
  static torch::Library m(torch::Library::IMPL, "isobit", c10::DispatchKey::Autograd, __FILE__,
                          __LINE__);
  static const bool registered = [] {
    m.impl("softmax", &differentiate<Softmax, const Tensor&>);
    m.impl("log_softmax", &differentiate<LogSoftmax, const Tensor&>);
    m.impl("silu", &differentiate<Silu, const Tensor&>);
    m.impl("gelu", &differentiate<Gelu, const Tensor&, bool>);
    m.impl("swiglu", &differentiate<Swiglu, const Tensor&, const Tensor&>);
    m.impl("rotary", &differentiate<Rotary, const Tensor&, const Tensor&, const Tensor&>);
    m.impl("embedding", &differentiate<Embedding, const Tensor&, const Tensor&,
                                       const OptionalTensor&, int64_t, int64_t>);
    m.impl("rms_norm", &differentiate<RmsNorm, const Tensor&, const Tensor&, double,
                                      const OptionalTensor&, bool, int64_t>);
    m.impl("layer_norm",
           &differentiate<LayerNorm, const Tensor&, const Tensor&, const OptionalTensor&, double,
                          const OptionalTensor&, int64_t>);
    return true;
  }();
  return registered;
}

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("check_derivatives(str public, Tensor[] tensors) -> ()");
  m.def("register_gradients(str torch) -> bool", &register_gradients);
}

}  // namespace isobit
