// Root-mean-square and layer norms over the last axis, and their gradients.
#include "row_norm.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "norm_parameter_sums.h"
#include "samples.h"

namespace isobit {

namespace {

// Rows [begin, end).
#define ISOBIT_NORM_FORWARD(versions, four, T)                                                    \
  versions void forward_rows(std::bool_constant<four>, const NormForward<T>& pass, int64_t begin, \
                             int64_t end) {                                                       \
    if (pass.means)                                                                               \
      for (int64_t row = begin; row < end; row++) forward_row<true, four>(pass, row);             \
    else                                                                                          \
      for (int64_t row = begin; row < end; row++) forward_row<false, four>(pass, row);            \
  }
ISOBIT_VERSIONS(ISOBIT_NORM_FORWARD, float)
ISOBIT_VERSIONS(ISOBIT_NORM_FORWARD, BFloat16)
ISOBIT_VERSIONS(ISOBIT_NORM_FORWARD, Half)

// backward_leaf: see backward_quarter. backward_padding: the rows of a token that is in no sample,
// which contributes to no sum.
#define ISOBIT_NORM_BACKWARD(T)                                                                    \
  ISOBIT_CLONES void backward_leaf(const NormBackward<T>& pass, const Leaf& leaf, int64_t quarter, \
                                   float* lanes, float* sum) {                                     \
    if (pass.means)                                                                                \
      backward_quarter<true>(pass, leaf, quarter, lanes, sum);                                     \
    else                                                                                           \
      backward_quarter<false>(pass, leaf, quarter, lanes, sum);                                    \
  }                                                                                                \
  ISOBIT_CLONES void backward_padding(const NormBackward<T>& pass, int64_t token) {                \
    for (int64_t row = token * pass.heads; row < (token + 1) * pass.heads; row++)                  \
      if (pass.means)                                                                              \
        backward_row<true>(pass, row, row, nullptr);                                               \
      else                                                                                         \
        backward_row<false>(pass, row, row, nullptr);                                              \
  }
ISOBIT_NORM_BACKWARD(float)
ISOBIT_NORM_BACKWARD(BFloat16)
ISOBIT_NORM_BACKWARD(Half)

using OptionalTensor = std::optional<Tensor>;

// A parameter [n] as contiguous fp32. Converted here: a call of the dispatcher costs more.
Tensor fp32_vector(const char* function, const Tensor& t) {
  if (t.scalar_type() == at::kFloat && t.is_contiguous()) return t;
  Tensor out = empty_tensor(t.sizes(), at::kFloat);
  float* dst = out.mutable_data_ptr<float>();  // [n]
  dispatch_dtype(function, t.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* src = t.const_data_ptr<T>();  // [n], stride = that of t
    const int64_t stride = t.stride(0);
    for (int64_t i = 0; i < t.numel(); i++) dst[i] = static_cast<float>(src[i * stride]);
  });
  return out;
}

// Rounds sums [columns] to a tensor.
Tensor rounded(const char* function, const float* sums, int64_t columns, at::ScalarType dtype) {
  Tensor out = empty_tensor({columns}, dtype);
  dispatch_dtype(function, dtype, [&](auto tag) {
    round_sums(sums, columns, out.mutable_data_ptr<typename decltype(tag)::type>());
  });
  return out;
}

// `heads`: x is [..., heads, n], and the samples count tokens without heads.
void check_norm(const char* function, const Tensor& x, const Tensor& parameter, bool heads) {
  check_attested();
  ISOBIT_CHECK(x.dim() >= (heads ? 2 : 1) && x.size(-1) > 0 && (!heads || x.size(-2) > 0), function,
               heads ? "x [..., heads, n], not empty along both" : "x [..., n] with n > 0",
               describe(x), c10::str("call isobit.", function));
  ISOBIT_CHECK(parameter.dim() == 1 && parameter.size(0) == x.size(-1) &&
                   parameter.scalar_type() == x.scalar_type(),
               function,
               c10::str("weight and bias ", dtype_name(x.scalar_type()), " [", x.size(-1),
                        "], as x is ", x.sizes()),
               describe(parameter), c10::str("call isobit.", function));
}

// Returns (y, means, scales); means is undefined for a root-mean-square norm.
std::tuple<Tensor, Tensor, Tensor> normalise(const char* function, const Tensor& x,
                                             const Tensor& weight, const OptionalTensor& bias,
                                             double eps, bool centred) {
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  const at::IntArrayRef leading = x.sizes().slice(0, x.dim() - 1);
  Tensor scales = empty_tensor(leading, at::kFloat);
  Tensor means = centred ? empty_tensor(leading, at::kFloat) : Tensor();
  if (out.numel() == 0) return {out, means, scales};
  const Tensor rows = as_rows(x), fp32_weight = fp32_vector(function, weight);
  const Tensor fp32_bias = bias ? fp32_vector(function, *bias) : Tensor();
  const int64_t n = rows.size(1);
  const Schedule features = feature_schedule(n);
  dispatch_dtype(function, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const NormForward<T> pass{features,
                              n,
                              row_data<T>(rows),
                              fp32_weight.const_data_ptr<float>(),
                              bias ? fp32_bias.const_data_ptr<float>() : nullptr,
                              static_cast<float>(eps),
                              centred ? means.mutable_data_ptr<float>() : nullptr,
                              scales.mutable_data_ptr<float>(),
                              out.mutable_data_ptr<T>()};
    at::parallel_for(0, rows.size(0), row_grain(n), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      call_version([&](auto four) { forward_rows(four, pass, begin, end); });
    });
  });
  return {out, means, scales};
}

struct BackwardInputs {
  const char* function;
  const Tensor& grad;    // as x
  const Tensor& x;       // [..., n], or [..., heads, n] if by_heads
  const Tensor& weight;  // [n]
  OptionalTensor means;  // fp32, as x without its last axis; none for a root-mean-square norm
  const Tensor& scales;  // fp32, as x without its last axis
  bool by_heads;         // sums are per head first

  int64_t n() const { return x.size(-1); }
  int64_t heads() const { return by_heads ? x.size(-2) : 1; }
};

void check_backward(const BackwardInputs& in) {
  ISOBIT_CHECK(in.grad.sizes() == in.x.sizes() && in.grad.scalar_type() == in.x.scalar_type(),
               in.function, c10::str("a gradient like x, ", describe(in.x)), describe(in.grad),
               c10::str("call isobit.", in.function, ", and let autograd call this"));
  const bool has_scales = in.scales.is_contiguous() && in.scales.scalar_type() == at::kFloat &&
                          in.scales.numel() * in.n() == in.x.numel();
  const bool has_means =
      !in.means || (in.means->is_contiguous() && in.means->numel() == in.scales.numel());
  ISOBIT_CHECK(has_scales && has_means, in.function,
               c10::str("contiguous float32 statistics of the rows of x, ", in.x.sizes()),
               c10::str("scales ", describe(in.scales),
                        in.means ? c10::str(" and means ", describe(*in.means)) : std::string()),
               c10::str("call isobit.", in.function, ", and let autograd call this"));
}

// Returns (dx, the quarters of all leaves [leaves, 4, width]).
std::tuple<Tensor, Tensor> backward_rows(const BackwardInputs& in, const Tensor& spans,
                                         const Schedule& samples) {
  check_backward(in);
  const Tensor& x = in.x;
  const int64_t n = in.n(), heads = in.heads();
  const Schedule features = feature_schedule(n);
  Tensor dx = empty_tensor(x.sizes(), x.scalar_type());
  const int64_t leaves = samples.leaf_count(), width = heads * n * (in.means ? 2 : 1);
  Tensor quarters = empty_tensor({leaves, 4, width}, at::kFloat);
  if (x.numel() == 0) return {dx, quarters.zero_()};  // samples without tokens
  float* sums = quarters.mutable_data_ptr<float>();   // [leaves * 4][width]
  const Tensor grad_rows = as_rows(in.grad), x_rows = as_rows(x);
  const Tensor fp32_weight = fp32_vector(in.function, in.weight);
  dispatch_dtype(in.function, x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const NormBackward<T> pass{features,
                               n,
                               heads,
                               row_data<T>(grad_rows),
                               row_data<T>(x_rows),
                               fp32_weight.const_data_ptr<float>(),
                               in.means ? in.means->const_data_ptr<float>() : nullptr,
                               in.scales.const_data_ptr<float>(),
                               dx.mutable_data_ptr<T>()};
    at::parallel_for(0, 4 * leaves, row_grain(leaf_length / 4 * width),
                     [&](int64_t begin, int64_t end) {
                       thread_local Scratch scratch;
                       FixedFpEnvironment fp_environment;
                       for (int64_t i = begin; i < end; i++)
                         backward_leaf(pass, samples.leaves[i / 4], i % 4,
                                       scratch.floats(4 * width), sums + i * width);
                     });
    const std::vector<int64_t> padding = tokens_outside(spans, x.numel() / (heads * n));
    at::parallel_for(0, padding.size(), row_grain(width), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      for (int64_t i = begin; i < end; i++) backward_padding(pass, padding[i]);
    });
  });
  return {dx, quarters};
}

// The axes that count tokens.
at::IntArrayRef token_axes(const Tensor& x, bool by_heads) {
  return x.sizes().slice(0, x.dim() - (by_heads ? 2 : 1));
}

// Returns (dx, dweight, dbias); dbias is undefined for a root-mean-square norm.
std::tuple<Tensor, Tensor, Tensor> gradients(const BackwardInputs& in, const OptionalTensor& spans,
                                             int64_t of) {
  check_norm(in.function, in.x, in.weight, in.by_heads);
  const Tensor known_spans = spans_or_default(in.function, spans, token_axes(in.x, in.by_heads));
  const GlobalBatch batch = global_batch(in.function, known_spans, of);
  const Schedule samples = sample_schedule(known_spans, 0, batch.global_samples);
  auto [dx, quarter_sums] = backward_rows(in, known_spans, samples);
  const int64_t n = in.n(), heads = in.heads();
  const Quarters quarters{quarter_sums.mutable_data_ptr<float>(), quarter_sums.size(2)};
  std::vector<float> total(in.means ? 2 * n : n, 0.0f);
  if (in.by_heads)
    merge_samples(sum_heads(known_spans, heads, heads, n, quarters), batch.global_samples,
                  total.data());
  else
    sum_samples(samples, quarters, total.data());
  const at::ScalarType dtype = batch.grad_dtype(in.x.scalar_type());
  return {dx, rounded(in.function, total.data(), n, dtype),
          in.means ? rounded(in.function, total.data() + n, n, dtype) : Tensor()};
}

// For tensor parallelism: x has heads that are one subtree of `all_heads`. Returns (dx, per sample
// the total of these heads [samples, n]).
std::tuple<Tensor, Tensor> rms_norm_sample_grads(const Tensor& grad, const Tensor& x,
                                                 const Tensor& weight, const Tensor& scales,
                                                 const Tensor& spans, int64_t all_heads) {
  check_norm("rms_norm", x, weight, true);
  ISOBIT_CHECK(is_subtree(x.size(-2), all_heads, feature_cap), "rms_norm",
               c10::str("heads that are one subtree of ", all_heads, " heads"),
               c10::str(x.size(-2), " heads"), "cut the heads into equal parts, a power of two");
  const Tensor known_spans = spans_or_default("rms_norm", spans, token_axes(x, true));
  const Schedule samples = sample_schedule(known_spans, 0, known_spans.size(0));
  auto [dx, quarters] =
      backward_rows({"rms_norm", grad, x, weight, {}, scales, true}, known_spans, samples);
  return {dx, sum_heads(known_spans, x.size(-2), all_heads, x.size(-1),
                        {quarters.mutable_data_ptr<float>(), quarters.size(2)})};
}

Tensor rms_norm_merge_samples(const Tensor& totals, int64_t of) {
  check_attested();
  ISOBIT_CHECK(totals.dim() == 2 && totals.scalar_type() == at::kFloat, "rms_norm",
               "totals float32 [samples, n]", describe(totals),
               "pass what torch.ops.isobit.rms_norm_sample_grads returned");
  ISOBIT_CHECK(of == 0 || is_subtree(totals.size(0), of, sample_cap), "rms_norm",
               c10::str("samples that are one subtree of a global batch of ", of),
               c10::str(totals.size(0), " samples"), "describe them by isobit.Samples");
  Tensor out = empty_tensor({totals.size(1)}, at::kFloat).zero_();
  merge_samples(totals.contiguous(), of ? of : totals.size(0), out.mutable_data_ptr<float>());
  return out;
}

// `spans` and `of` are not used in the forwards: autograd passes them to the gradients.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps,
                                    const OptionalTensor& /*spans*/, bool heads, int64_t /*of*/) {
  check_norm("rms_norm", x, weight, heads);
  auto [y, means, scales] = normalise("rms_norm", x, weight, {}, eps, false);
  return {y, scales};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x,
                                             const Tensor& weight, const Tensor& scales,
                                             const OptionalTensor& spans, bool heads, int64_t of) {
  auto [dx, dweight, dbias] =
      gradients({"rms_norm", grad, x, weight, {}, scales, heads}, spans, of);
  return {dx, dweight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight,
                                              const OptionalTensor& bias, double eps,
                                              const OptionalTensor& /*spans*/, int64_t /*of*/) {
  check_norm("layer_norm", x, weight, false);
  if (bias) check_norm("layer_norm", x, *bias, false);
  return normalise("layer_norm", x, weight, bias, eps, true);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, const Tensor& means,
                                                       const Tensor& scales,
                                                       const OptionalTensor& spans, int64_t of) {
  return gradients({"layer_norm", grad, x, weight, means, scales, false}, spans, of);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps=1e-6, Tensor? spans=None, bool heads=False, "
      "int of=0) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor? spans, "
      "bool heads, int of=0) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_sample_grads(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor spans, "
      "int all_heads) -> (Tensor, Tensor)");
  m.def("rms_norm_merge_samples(Tensor totals, int of) -> Tensor");
  m.def(
      "layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5, "
      "Tensor? spans=None, int of=0) -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor means, Tensor scales, "
      "Tensor? spans, int of=0) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_backward", &rms_norm_backward);
  m.impl("rms_norm_sample_grads", &rms_norm_sample_grads);
  m.impl("rms_norm_merge_samples", &rms_norm_merge_samples);
  m.impl("layer_norm", &layer_norm);
  m.impl("layer_norm_backward", &layer_norm_backward);
}

}  // namespace isobit
