// SiLU, GELU and SwiGLU, and their gradients: functions of one element, the same in the body and in
// the tail.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <vector>

#include "attested.h"
#include "elementary.h"
#include "rows.h"

namespace isobit {

namespace {

enum class Formula {
  silu,
  silu_backward,
  gelu,
  gelu_backward,
  tanh_gelu,
  tanh_gelu_backward,
  swiglu,
  swiglu_backward
};

struct Silu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* x, Floats* y) {
    Floats e, total;
    logistic(x[0], e, total);
    y[0] = x[0] / total;
  }
};

ISOBIT_INLINE void silu_slope(const Floats& x, Floats& s, Floats& slope) {
  Floats rest;
  sigmoid(x, s, rest);
  slope = s * (x * rest + 1.0f);
}

struct SiluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* in, Floats* dx) {
    Floats s, slope;
    silu_slope(in[1], s, slope);
    dx[0] = in[0] * slope;
  }
};

struct Gelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* x, Floats* y) {
    Floats share, density;
    normal_share(x[0], share, density);
    y[0] = x[0] * share;
  }
};

struct GeluBackward {
  static constexpr int64_t inputs = 2, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* in, Floats* dx) {
    Floats share, density;
    normal_share(in[1], share, density);
    dx[0] = in[0] * (in[1] * density + share);
  }
};

// tanh's GELU is x times the logistic function of x (k + k' x²): that argument and its slope, of an
// x bounded so that no power overflows.
struct TanhArgument {
  Floats near, value, slope;
  ISOBIT_INLINE explicit TanhArgument(const Floats& x) {
    constexpr float bound = 32.0f;  // beyond it the logistic function is 0 or 1
    constexpr float linear = 0x1.988454p+0f, cubic = 0x1.2444f2p-4f, cubic_slope = 0x1.b6676cp-3f;
    near = x > bound ? Floats{} + bound : x;
    near = near < -bound ? Floats{} - bound : near;
    const Floats square = near * near;
    value = near * (square * cubic + linear);
    slope = square * cubic_slope + linear;
  }
};

struct TanhGelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* x, Floats* y) {
    Floats e, total;
    logistic(TanhArgument(x[0]).value, e, total);
    y[0] = x[0] / total;
  }
};

struct TanhGeluBackward {
  static constexpr int64_t inputs = 2, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* in, Floats* dx) {
    const TanhArgument argument(in[1]);
    Floats s, rest;
    sigmoid(argument.value, s, rest);
    dx[0] = in[0] * (s * (argument.near * (rest * argument.slope) + 1.0f));
  }
};

struct Swiglu {  // of (gate, up)
  static constexpr int64_t inputs = 2, outputs = 1;
  static ISOBIT_INLINE void apply(const Floats* in, Floats* y) {
    Silu::apply(in, y);
    y[0] = y[0] * in[1];
  }
};

struct SwigluBackward {  // of (gradient, gate, up)
  static constexpr int64_t inputs = 3, outputs = 2;
  static ISOBIT_INLINE void apply(const Floats* in, Floats* out) {
    Floats s, slope;
    silu_slope(in[1], s, slope);
    out[0] = in[0] * in[2] * slope;
    out[1] = in[0] * (in[1] * s);
  }
};

template <class F, class T>
ISOBIT_INLINE void apply_some(const T* const* in, T* const* out, int64_t at, int64_t count) {
  Floats given[F::inputs], found[F::outputs];
  for (int64_t i = 0; i < F::inputs; i++) widen_some(in[i] + at, count, 0.0f, given[i]);
  F::apply(given, found);
  for (int64_t i = 0; i < F::outputs; i++) round_some(found[i], count, out[i] + at);
}

template <class F, class T>
ISOBIT_INLINE void apply_all(const T* const* in, T* const* out, int64_t n) {
  // Copies of the pointers, since what is written could be pointers for all the compiler knows.
  const T* from[F::inputs];
  T* to[F::outputs];
  std::copy(in, in + F::inputs, from);
  std::copy(out, out + F::outputs, to);
  int64_t at = 0;
  for (; at + lane_count <= n; at += lane_count) apply_some<F>(from, to, at, lane_count);
  if (at < n) apply_some<F>(from, to, at, n - at);
}

#define ISOBIT_ELEMENTS(T)                                                                  \
  ISOBIT_CLONES void apply(Formula formula, const T* const* in, T* const* out, int64_t n) { \
    switch (formula) {                                                                      \
      case Formula::silu:                                                                   \
        return apply_all<Silu>(in, out, n);                                                 \
      case Formula::silu_backward:                                                          \
        return apply_all<SiluBackward>(in, out, n);                                         \
      case Formula::gelu:                                                                   \
        return apply_all<Gelu>(in, out, n);                                                 \
      case Formula::gelu_backward:                                                          \
        return apply_all<GeluBackward>(in, out, n);                                         \
      case Formula::tanh_gelu:                                                              \
        return apply_all<TanhGelu>(in, out, n);                                             \
      case Formula::tanh_gelu_backward:                                                     \
        return apply_all<TanhGeluBackward>(in, out, n);                                     \
      case Formula::swiglu:                                                                 \
        return apply_all<Swiglu>(in, out, n);                                               \
      case Formula::swiglu_backward:                                                        \
        return apply_all<SwigluBackward>(in, out, n);                                       \
    }                                                                                       \
  }
ISOBIT_ELEMENTS(float)
ISOBIT_ELEMENTS(BFloat16)
ISOBIT_ELEMENTS(Half)

// One flat run where all is contiguous, else row by row; rows whose elements are apart are copied,
// which adds nothing.
struct Runs {
  std::vector<Tensor> in;
  bool flat = true;
  int64_t unit = 1;

  explicit Runs(std::vector<Tensor> tensors) : in(std::move(tensors)) {
    for (const Tensor& t : in) flat = flat && t.is_contiguous();
    if (flat) return;
    unit = in[0].size(-1);
    for (Tensor& t : in) t = rows_of(t);
  }
  int64_t step(int64_t i) const { return flat ? 1 : in[i].stride(0); }
};

std::vector<Tensor> compute(Formula formula, std::vector<Tensor> in, int64_t outputs = 1) {
  check_attested();
  for (const Tensor& t : in)
    TORCH_CHECK(t.sizes() == in[0].sizes() && t.scalar_type() == in[0].scalar_type() &&
                    t.device() == in[0].device(),
                "isobit: expected tensors alike, received ", in[0].sizes(), " ",
                in[0].scalar_type(), " and ", t.sizes(), " ", t.scalar_type(),
                "; remedy: call the function of the package, which says which");
  std::vector<Tensor> out;
  for (int64_t i = 0; i < outputs; i++)
    out.push_back(empty_tensor(in[0].sizes(), in[0].scalar_type()));
  if (out[0].numel() == 0) return out;
  const Runs runs(std::move(in));
  by_type(out[0], [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from[3] = {};
    T* to[2] = {};
    for (size_t i = 0; i < runs.in.size(); i++) from[i] = runs.in[i].template const_data_ptr<T>();
    for (int64_t i = 0; i < outputs; i++) to[i] = out[i].template mutable_data_ptr<T>();
    const int64_t unit = runs.unit;
    at::parallel_for(0, out[0].numel() / unit, std::max<int64_t>(grain / unit, 1),
                     [&](int64_t begin, int64_t end) {
                       PlainArithmetic plain;
                       const T* left[3] = {};
                       T* right[2] = {};
                       for (int64_t at = begin; at < end; at += runs.flat ? end - begin : 1) {
                         for (size_t i = 0; i < runs.in.size(); i++)
                           left[i] = from[i] + at * runs.step(i);
                         for (int64_t i = 0; i < outputs; i++) right[i] = to[i] + at * unit;
                         apply(formula, left, right, runs.flat ? end - begin : unit);
                       }
                     });
  });
  return out;
}

Tensor silu(const Tensor& x) { return compute(Formula::silu, {x})[0]; }
Tensor silu_backward(const Tensor& grad, const Tensor& x) {
  return compute(Formula::silu_backward, {grad, x})[0];
}

Tensor gelu(const Tensor& x, bool tanh) {
  return compute(tanh ? Formula::tanh_gelu : Formula::gelu, {x})[0];
}
Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  return compute(tanh ? Formula::tanh_gelu_backward : Formula::gelu_backward, {grad, x})[0];
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return compute(Formula::swiglu, {gate, up})[0];
}
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate,
                                           const Tensor& up) {
  const std::vector<Tensor> out = compute(Formula::swiglu_backward, {grad, gate, up}, 2);
  return {out[0], out[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("silu(Tensor x) -> Tensor");
  m.def("silu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("gelu(Tensor x, bool tanh) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x, bool tanh) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("silu", &silu);
  m.impl("silu_backward", &silu_backward);
  m.impl("gelu", &gelu);
  m.impl("gelu_backward", &gelu_backward);
  m.impl("swiglu", &swiglu);
  m.impl("swiglu_backward", &swiglu_backward);
}

}  // namespace isobit
