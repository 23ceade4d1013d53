// SiLU, GELU and SwiGLU, and their gradients: functions of one element.
//
// A value has the same result in the vector body and in the tail of a loop.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <vector>

#include "attestation.h"
#include "elementary.h"
#include "rows.h"

namespace isobit {

namespace {

// Each formula below is a struct with `inputs` and `outputs` (numbers of tensors) and
// apply(in, out): in [inputs] and out [outputs] vectors, of sixteen elements or of four times as
// many (see [Note: four vectors] in lanes.h).
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
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector e, denominator;
    logistic_denominator(x[0], e, denominator);
    y[0] = x[0] / denominator;
  }
};

// Sets s to the logistic function of x, and derivative to that of silu.
template <class Vector>
ISOBIT_INLINE void silu_derivative(const Vector& x, Vector& s, Vector& derivative) {
  Vector complement;
  sigmoid(x, s, complement);
  derivative = s * (x * complement + 1.0f);
}

struct SiluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    Vector s, derivative;
    silu_derivative(in[1], s, derivative);
    dx[0] = in[0] * derivative;
  }
};

struct Gelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector cdf, density;
    normal_cdf(x[0], cdf, density);
    y[0] = x[0] * cdf;
  }
};

struct GeluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    Vector cdf, density;
    normal_cdf(in[1], cdf, density);
    dx[0] = in[0] * (in[1] * density + cdf);
  }
};

// The tanh form of GELU is x times the logistic function of x (k + k' x²). This is that argument
// and its derivative, for x clamped so that no power overflows.
template <class Vector>
struct TanhArgument {
  Vector clamped, value, derivative;
  ISOBIT_INLINE explicit TanhArgument(const Vector& x) {
    constexpr float bound = 32.0f;  // beyond it the logistic function is 0 or 1
    constexpr float linear = 0x1.988454p+0f, cubic = 0x1.2444f2p-4f,
                    cubic_derivative = 0x1.b6676cp-3f;
    clamped = x;
    set_where_greater(x, bound, bound, clamped);
    set_where_less(x, -bound, -bound, clamped);
    const Vector square = clamped * clamped;
    value = clamped * (square * cubic + linear);
    derivative = square * cubic_derivative + linear;
  }
};

struct TanhGelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector e, denominator;
    logistic_denominator(TanhArgument<Vector>(x[0]).value, e, denominator);
    y[0] = x[0] / denominator;
  }
};

struct TanhGeluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    const TanhArgument<Vector> argument(in[1]);
    Vector s, complement;
    sigmoid(argument.value, s, complement);
    dx[0] = in[0] * (s * (argument.clamped * (complement * argument.derivative) + 1.0f));
  }
};

struct Swiglu {  // of (gate, up)
  static constexpr int64_t inputs = 2, outputs = 1;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* y) {
    Silu::apply(in, y);
    y[0] = y[0] * in[1];
  }
};

struct SwigluBackward {  // of (gradient, gate, up), to (dgate, dup)
  static constexpr int64_t inputs = 3, outputs = 2;
  template <class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* out) {
    Vector s, derivative;
    silu_derivative(in[1], s, derivative);
    out[0] = in[0] * in[2] * derivative;
    out[1] = in[0] * (in[1] * s);
  }
};

// in [inputs] and out [outputs] are pointers to [n] elements; elements [at, at + count), count
// <= 16.
template <class F, class T>
ISOBIT_INLINE void apply_lanes(const T* const* in, T* const* out, int64_t at, int64_t count) {
  Floats inputs[F::inputs], outputs[F::outputs];
  for (int64_t i = 0; i < F::inputs; i++) load_lanes(in[i] + at, count, 0.0f, inputs[i]);
  F::apply(inputs, outputs);
  for (int64_t i = 0; i < F::outputs; i++) store_lanes(outputs[i], count, out[i] + at);
}

// The same of elements [at, at + 64).
template <class F, class T>
ISOBIT_INLINE void apply_lanes4(const T* const* in, T* const* out, int64_t at) {
  Floats4 inputs[F::inputs], outputs[F::outputs];
  for (int64_t i = 0; i < F::inputs; i++) load(in[i] + at, inputs[i]);
  F::apply(inputs, outputs);
  for (int64_t i = 0; i < F::outputs; i++) round_to(outputs[i], out[i] + at);
}

template <class F, bool four, class T>
ISOBIT_INLINE void apply_formula(const T* const* in, T* const* out, int64_t n) {
  // Local copies of the pointers: otherwise the compiler must assume that a store changes them.
  const T* src[F::inputs];
  T* dst[F::outputs];
  std::copy(in, in + F::inputs, src);
  std::copy(out, out + F::outputs, dst);
  int64_t at = 0;
  if constexpr (four)
    for (; at + lane_count4 <= n; at += lane_count4) apply_lanes4<F>(src, dst, at);
  for (; at + lane_count <= n; at += lane_count) apply_lanes<F>(src, dst, at, lane_count);
  if (at < n) apply_lanes<F>(src, dst, at, n - at);
}

#define ISOBIT_ELEMENTS(versions, four, T)                                           \
  versions void apply(std::bool_constant<four>, Formula formula, const T* const* in, \
                      T* const* out, int64_t n) {                                    \
    switch (formula) {                                                               \
      case Formula::silu:                                                            \
        return apply_formula<Silu, four>(in, out, n);                                \
      case Formula::silu_backward:                                                   \
        return apply_formula<SiluBackward, four>(in, out, n);                        \
      case Formula::gelu:                                                            \
        return apply_formula<Gelu, four>(in, out, n);                                \
      case Formula::gelu_backward:                                                   \
        return apply_formula<GeluBackward, four>(in, out, n);                        \
      case Formula::tanh_gelu:                                                       \
        return apply_formula<TanhGelu, four>(in, out, n);                            \
      case Formula::tanh_gelu_backward:                                              \
        return apply_formula<TanhGeluBackward, four>(in, out, n);                    \
      case Formula::swiglu:                                                          \
        return apply_formula<Swiglu, four>(in, out, n);                              \
      case Formula::swiglu_backward:                                                 \
        return apply_formula<SwigluBackward, four>(in, out, n);                      \
    }                                                                                \
  }
ISOBIT_VERSIONS(ISOBIT_ELEMENTS, float)
ISOBIT_VERSIONS(ISOBIT_ELEMENTS, BFloat16)
ISOBIT_VERSIONS(ISOBIT_ELEMENTS, Half)

// The inputs as runs of contiguous elements: one run if all are contiguous, else one per row. Rows
// whose elements are not contiguous are copied.
struct ContiguousRuns {
  std::vector<Tensor> inputs;
  bool flat = true;
  int64_t length = 1;  // of a run, or 1 if flat

  explicit ContiguousRuns(std::vector<Tensor> tensors) : inputs(std::move(tensors)) {
    for (const Tensor& t : inputs) flat = flat && t.is_contiguous();
    if (flat) return;
    length = inputs[0].size(-1);
    for (Tensor& t : inputs) t = as_rows(t);
  }
  // Elements between the starts of runs of input i.
  int64_t stride(int64_t i) const { return flat ? 1 : inputs[i].stride(0); }
};

void check_alike(const char* function, const std::vector<Tensor>& inputs) {
  for (const Tensor& t : inputs)
    ISOBIT_CHECK(t.sizes() == inputs[0].sizes() && t.scalar_type() == inputs[0].scalar_type() &&
                     t.device() == inputs[0].device(),
                 function, c10::str("tensors like the first, ", describe(inputs[0])), describe(t),
                 c10::str("call isobit.", function));
}

std::vector<Tensor> compute(const char* function, Formula formula, std::vector<Tensor> inputs,
                            int64_t outputs = 1) {
  check_attested();
  check_alike(function, inputs);
  const at::ScalarType dtype = inputs[0].scalar_type();
  std::vector<Tensor> out;
  for (int64_t i = 0; i < outputs; i++) out.push_back(empty_tensor(inputs[0].sizes(), dtype));
  if (out[0].numel() == 0) return out;
  const ContiguousRuns runs(std::move(inputs));
  const int64_t length = runs.length, input_count = static_cast<int64_t>(runs.inputs.size());
  dispatch_dtype(function, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* src[3] = {};  // per input: its runs, stride = runs.stride(i)
    T* dst[2] = {};        // per output: its runs, stride = length
    for (int64_t i = 0; i < input_count; i++) src[i] = runs.inputs[i].template const_data_ptr<T>();
    for (int64_t i = 0; i < outputs; i++) dst[i] = out[i].template mutable_data_ptr<T>();
    const int64_t count = out[0].numel() / length;
    at::parallel_for(0, count, row_grain(length), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      const T* run_src[3] = {};  // as src, from run `at` on
      T* run_dst[2] = {};        // as dst, from run `at` on
      for (int64_t at = begin; at < end; at += runs.flat ? end - begin : 1) {
        for (int64_t i = 0; i < input_count; i++) run_src[i] = src[i] + at * runs.stride(i);
        for (int64_t i = 0; i < outputs; i++) run_dst[i] = dst[i] + at * length;
        call_version([&](auto four) {
          apply(four, formula, run_src, run_dst, runs.flat ? end - begin : length);
        });
      }
    });
  });
  return out;
}

Tensor silu(const Tensor& x) { return compute("silu", Formula::silu, {x})[0]; }
Tensor silu_backward(const Tensor& grad, const Tensor& x) {
  return compute("silu", Formula::silu_backward, {grad, x})[0];
}

Tensor gelu(const Tensor& x, bool tanh) {
  return compute("gelu", tanh ? Formula::tanh_gelu : Formula::gelu, {x})[0];
}
Tensor gelu_backward(const Tensor& grad, const Tensor& x, bool tanh) {
  const Formula formula = tanh ? Formula::tanh_gelu_backward : Formula::gelu_backward;
  return compute("gelu", formula, {grad, x})[0];
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  return compute("swiglu", Formula::swiglu, {gate, up})[0];
}
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& gate,
                                           const Tensor& up) {
  const std::vector<Tensor> out = compute("swiglu", Formula::swiglu_backward, {grad, gate, up}, 2);
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
