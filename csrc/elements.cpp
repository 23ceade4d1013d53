// SiLU, GELU and SwiGLU, and their gradients: functions of one element.
//
// A value has the same result in the vector body and in the tail of a loop.
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <vector>

#include "attestation.h"
#include "element_formulas.h"
#include "rows.h"

namespace isobit {

namespace {

// Those of element_formulas.h.
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

// in [inputs] and out [outputs] are pointers to [n] elements; elements [at, at + count), count
// <= 16.
template <class F, class T>
ISOBIT_INLINE void apply_lanes(const T* const* in, T* const* out, int64_t at, int64_t count) {
  Floats inputs[F::inputs], outputs[F::outputs];
  for (int64_t i = 0; i < F::inputs; i++) load_lanes(in[i] + at, count, 0.0f, inputs[i]);
  F::template apply<false>(inputs, outputs);
  for (int64_t i = 0; i < F::outputs; i++) store_lanes(outputs[i], count, out[i] + at);
}

// The same of elements [at, at + 64).
template <class F, class T>
ISOBIT_INLINE void apply_lanes4(const T* const* in, T* const* out, int64_t at) {
  Floats4 inputs[F::inputs], outputs[F::outputs];
  bool bounded = true;
  for (int64_t i = 0; i < F::inputs; i++) {
    load(in[i] + at, inputs[i]);
    bounded &= all_within(inputs[i], F::bounds[i]);
  }
  if (bounded) [[likely]] {
    F::template apply<true>(inputs, outputs);
    for (int64_t i = 0; i < F::outputs; i++) round_numbers_to(outputs[i], out[i] + at);
  } else {
    F::template apply<false>(inputs, outputs);
    for (int64_t i = 0; i < F::outputs; i++) round_to(outputs[i], out[i] + at);
  }
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

// [Note: tables] A function of one 16-bit element has 65536 results. They are computed once, by the
// loop above, and looked up in every call: a lookup costs less than the chain, and has its bits.
template <Formula formula, class T>
const T* table_of() {
  static const std::vector<T> table = [] {
    std::vector<T> x(1 << 16), y(1 << 16);
    for (size_t i = 0; i < x.size(); i++) x[i].x = static_cast<uint16_t>(i);
    const T* in = x.data();
    T* out = y.data();
    FixedFpEnvironment fp_environment;
    call_version([&](auto four) { apply(four, formula, &in, &out, 1 << 16); });
    return y;
  }();
  return table.data();
}

// The table of a formula [65536]; null for fp32, and for a formula of several inputs.
template <class T>
const T* find_table(Formula formula) {
  if constexpr (sizeof(T) == 2) {
    if (formula == Formula::silu) return table_of<Formula::silu, T>();
    if (formula == Formula::gelu) return table_of<Formula::gelu, T>();
    if (formula == Formula::tanh_gelu) return table_of<Formula::tanh_gelu, T>();
  }
  return nullptr;
}

// table is [65536], x and out are [n].
template <class T>
void look_up(const T* table, const T* x, T* __restrict out, int64_t n) {
  if constexpr (sizeof(T) == 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; i++) out[i] = table[x[i].x];
  }
}

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
    const T* table = find_table<T>(formula);
    const int64_t count = out[0].numel() / length;
    at::parallel_for(0, count, row_grain(length), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      const T* run_src[3] = {};  // as src, from run `at` on
      T* run_dst[2] = {};        // as dst, from run `at` on
      for (int64_t at = begin; at < end; at += runs.flat ? end - begin : 1) {
        for (int64_t i = 0; i < input_count; i++) run_src[i] = src[i] + at * runs.stride(i);
        for (int64_t i = 0; i < outputs; i++) run_dst[i] = dst[i] + at * length;
        const int64_t n = runs.flat ? end - begin : length;
        if (table)
          look_up(table, run_src[0], run_dst[0], n);
        else
          call_version([&](auto four) { apply(four, formula, run_src, run_dst, n); });
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
