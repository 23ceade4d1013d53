// Root-mean-square and layer norms over the last axis, and the gradients of their weights over the samples.
#include "row_norm.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attested.h"
#include "samples.h"

namespace isobit {

namespace {

#define ISOBIT_NORM(T)                                                                                        \
  ISOBIT_CLONES void forward_rows(const Forward<T>& pass, int64_t begin, int64_t end) {                       \
    if (pass.means)                                                                                           \
      for (int64_t row = begin; row < end; row++) forward_row<true>(pass, row);                               \
    else                                                                                                      \
      for (int64_t row = begin; row < end; row++) forward_row<false>(pass, row);                              \
  }                                                                                                           \
  ISOBIT_CLONES void backward_some(const Backward<T>& pass, const Leaf& leaf, int64_t quarter, float* lanes,  \
                                   float* sum) {                                                              \
    if (pass.means) backward_quarter<true>(pass, leaf, quarter, lanes, sum);                                  \
    else backward_quarter<false>(pass, leaf, quarter, lanes, sum);                                            \
  }                                                                                                           \
  ISOBIT_CLONES void backward_padding(const Backward<T>& pass, int64_t token) {                               \
    for (int64_t row = token * pass.heads; row < (token + 1) * pass.heads; row++)                             \
      if (pass.means) backward_row<true>(pass, row, row, nullptr);                                                 \
      else backward_row<false>(pass, row, row, nullptr);                                                           \
  }
ISOBIT_NORM(float)
ISOBIT_NORM(BFloat16)
ISOBIT_NORM(Half)

// ---- sums over the samples -----------------------------------------------------------------------------

// The quarters of every leaf: [leaves, 4, width].
struct Quarters {
  float* data;
  int64_t width;
  // Columns from `at` on, merged in place: each leaf is asked for once.
  void sum(int64_t leaf, int64_t at, int64_t columns, float* to) const {
    float* from = data + leaf * 4 * width + at;
    merge4(from, from + width, from + 2 * width, from + 3 * width, columns);
    std::copy(from, from + columns, to);
  }
};

void sum_samples(const Schedule& samples, const Quarters& quarters, float* out) {
  at::parallel_for(0, quarters.width, 256, [&](int64_t begin, int64_t end) {
    PlainArithmetic plain;
    ColumnSum sum(samples, end - begin);
    sum.run([&](int64_t leaf, float* to) { quarters.sum(leaf, begin, end - begin, to); }, out + begin, 0);
  });
}

// Each head's tokens by themselves, then the heads of a sample, then the samples.
void sum_heads(const Tensor& spans, int64_t heads, int64_t n, const Quarters& quarters, float* out) {
  PlainArithmetic plain;
  const int64_t count = spans.size(0), *span = spans.const_data_ptr<int64_t>();
  const Schedule of_samples = item_schedule(count, sample_cap), of_heads = item_schedule(heads, feature_cap);
  ColumnSum over_samples(of_samples, n), over_heads(of_heads, n);
  std::vector<float> totals(heads * n);
  int64_t first = 0;
  over_samples.run([&](int64_t sample, float* to) {
    Schedule tokens;
    push_run(tokens, span[2 * sample], span[2 * sample + 1], token_leaf, false);
    tokens.segment_end.push_back(tokens.leaves.size());
    ColumnSum(tokens, heads * n).run(
        [&](int64_t leaf, float* sum) { quarters.sum(first + leaf, 0, heads * n, sum); }, totals.data(), 0);
    first += tokens.leaves.size();
    over_heads.run([&](int64_t h, float* sum) { std::copy_n(totals.data() + h * n, n, sum); }, to, 0);
  }, out, 0);
}

std::vector<int64_t> tokens_outside(const Tensor& spans, int64_t tokens) {
  std::vector<bool> inside(tokens);
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); i++, span += 2) std::fill_n(inside.begin() + span[0], span[1], true);
  std::vector<int64_t> outside;
  for (int64_t t = 0; t < tokens; t++)
    if (!inside[t]) outside.push_back(t);
  return outside;
}

Tensor rounded(const float* sum, int64_t columns, at::ScalarType type) {
  Tensor out = empty_tensor({columns}, type);
  by_type(out, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    finish(sum, nullptr, nullptr, nullptr, columns, nullptr, 1, columns, out.mutable_data_ptr<T>(), columns);
  });
  return out;
}

Tensor fp32_vector(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

// ---- operators -----------------------------------------------------------------------------------------

using Optional = std::optional<Tensor>;

void check_norm(const Tensor& x, const Tensor& weight, bool heads) {
  check_attested();
  TORCH_CHECK(x.dim() >= (heads ? 2 : 1) && weight.dim() == 1 && weight.size(0) == x.size(-1) && x.size(-1) > 0 &&
                  weight.scalar_type() == x.scalar_type() && (!heads || x.size(-2) > 0),
              "isobit: expected x [..., n] and weight [n] of one dtype, received ", x.sizes(), " and ", weight.sizes(),
              "; remedy: call isobit.rms_norm or isobit.layer_norm, which say which");
}

// (y, means, scales); a root mean square has no means.
std::tuple<Tensor, Tensor, Tensor> normalise(const Tensor& x, const Tensor& weight, const Optional& bias, double eps,
                                             bool centred) {
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  const at::IntArrayRef leading = x.sizes().slice(0, x.dim() - 1);
  Tensor scales = empty_tensor(leading, at::kFloat), means = centred ? empty_tensor(leading, at::kFloat) : Tensor();
  if (out.numel() == 0) return {out, means, scales};
  const Tensor rows = rows_of(x), gain = fp32_vector(weight), shift = bias ? fp32_vector(*bias) : Tensor();
  const int64_t n = rows.size(1);
  const Schedule features = schedule_of(n);
  by_type(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Forward<T> pass{features, n, rows.const_data_ptr<T>(), rows.stride(0), gain.const_data_ptr<float>(),
                          bias ? shift.const_data_ptr<float>() : nullptr, static_cast<float>(eps),
                          centred ? means.mutable_data_ptr<float>() : nullptr, scales.mutable_data_ptr<float>(),
                          out.mutable_data_ptr<T>()};
    at::parallel_for(0, rows.size(0), std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      forward_rows(pass, begin, end);
    });
  });
  return {out, means, scales};
}

// (dx, dweight, dbias); a root mean square has no bias.
std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Optional& means, const Tensor& scales, const Optional& spans,
                                             bool by_heads) {
  check_norm(x, weight, by_heads);
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && scales.is_contiguous() &&
                  scales.numel() * x.size(-1) == x.numel() && scales.scalar_type() == at::kFloat &&
                  (!means || (means->is_contiguous() && means->numel() == scales.numel())),
              "isobit: expected a gradient like x, received ", grad.sizes(), " and ", x.sizes(),
              "; remedy: call isobit.rms_norm or isobit.layer_norm, and let autograd call this");
  const Tensor whole = spans_of(spans, x.sizes().slice(0, x.dim() - (by_heads ? 2 : 1)));
  const int64_t n = x.size(-1), heads = by_heads ? x.size(-2) : 1, count = whole.size(0);
  const Schedule features = schedule_of(n), samples = sample_schedule(whole.const_data_ptr<int64_t>(), count, 0, count);
  Tensor dx = empty_tensor(x.sizes(), x.scalar_type());
  const int64_t leaves = samples.leaves.size(), width = heads * n * (means ? 2 : 1);
  Tensor quarters = empty_tensor({leaves, 4, width}, at::kFloat);
  float* sums = quarters.mutable_data_ptr<float>();
  const Tensor left = rows_of(grad), right = rows_of(x), gain = fp32_vector(weight);
  by_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Backward<T> pass{features, n, heads, left.const_data_ptr<T>(), left.stride(0), right.const_data_ptr<T>(),
                           right.stride(0), gain.const_data_ptr<float>(),
                           means ? means->const_data_ptr<float>() : nullptr, scales.const_data_ptr<float>(),
                           dx.mutable_data_ptr<T>()};
    const int64_t least = std::max<int64_t>(grain / (token_leaf / 4 * width), 1);
    at::parallel_for(0, 4 * leaves, least, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      PlainArithmetic plain;
      for (int64_t i = begin; i < end; i++)
        backward_some(pass, samples.leaves[i / 4], i % 4, scratch.floats(4 * width), sums + i * width);
    });
    const std::vector<int64_t> padding = tokens_outside(whole, x.numel() / (heads * n));
    at::parallel_for(0, padding.size(), std::max<int64_t>(grain / width, 1), [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      for (int64_t i = begin; i < end; i++) backward_padding(pass, padding[i]);
    });
  });
  std::vector<float> total(means ? 2 * n : n, 0.0f);
  if (by_heads) sum_heads(whole, heads, n, {sums, width}, total.data());
  else sum_samples(samples, {sums, width}, total.data());
  return {dx, rounded(total.data(), n, x.scalar_type()),
          means ? rounded(total.data() + n, n, x.scalar_type()) : Tensor()};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps, const Optional&, bool heads) {
  check_norm(x, weight, heads);
  auto [y, means, scales] = normalise(x, weight, {}, eps, false);
  return {y, scales};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                             const Tensor& scales, const Optional& spans, bool heads) {
  auto [dx, dweight, dbias] = gradients(grad, x, weight, {}, scales, spans, heads);
  return {dx, dweight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Optional& bias, double eps,
                                              const Optional&) {
  check_norm(x, weight, false);
  if (bias) check_norm(x, *bias, false);
  return normalise(x, weight, bias, eps, true);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                       const Tensor& means, const Tensor& scales,
                                                       const Optional& spans) {
  return gradients(grad, x, weight, means, scales, spans, false);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-6, Tensor? spans=None, bool heads=False) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor? spans, bool heads) -> "
        "(Tensor, Tensor)");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5, Tensor? spans=None) -> "
        "(Tensor, Tensor, Tensor)");
  m.def("layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor means, Tensor scales, Tensor? spans) -> "
        "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_backward", &rms_norm_backward);
  m.impl("layer_norm", &layer_norm);
  m.impl("layer_norm_backward", &layer_norm_backward);
}

}  // namespace isobit
