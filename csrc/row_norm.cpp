// Root-mean-square and layer norms over the last axis, and the gradients of their weights over the
// samples.
#include "row_norm.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attested.h"
#include "samples.h"

namespace isobit {

namespace {

#define ISOBIT_NORM(T)                                                                         \
  ISOBIT_CLONES void forward_rows(const Forward<T>& pass, int64_t begin, int64_t end) {        \
    if (pass.means)                                                                            \
      for (int64_t row = begin; row < end; row++) forward_row<true>(pass, row);                \
    else                                                                                       \
      for (int64_t row = begin; row < end; row++) forward_row<false>(pass, row);               \
  }                                                                                            \
  ISOBIT_CLONES void backward_some(const Backward<T>& pass, const Leaf& leaf, int64_t quarter, \
                                   float* lanes, float* sum) {                                 \
    if (pass.means)                                                                            \
      backward_quarter<true>(pass, leaf, quarter, lanes, sum);                                 \
    else                                                                                       \
      backward_quarter<false>(pass, leaf, quarter, lanes, sum);                                \
  }                                                                                            \
  ISOBIT_CLONES void backward_padding(const Backward<T>& pass, int64_t token) {                \
    for (int64_t row = token * pass.heads; row < (token + 1) * pass.heads; row++)              \
      if (pass.means)                                                                          \
        backward_row<true>(pass, row, row, nullptr);                                           \
      else                                                                                     \
        backward_row<false>(pass, row, row, nullptr);                                          \
  }
ISOBIT_NORM(float)
ISOBIT_NORM(BFloat16)
ISOBIT_NORM(Half)

// ---- sums over the samples
// -----------------------------------------------------------------------------

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
    sum.run([&](int64_t leaf, float* to) { quarters.sum(leaf, begin, end - begin, to); },
            out + begin, 0);
  });
}

// The sum of rows [items, n], each a sum of its own.
void merge_items(const float* rows, int64_t n, const Schedule& items, float* out) {
  ColumnSum(items, n).run([&](int64_t item, float* to) { std::copy_n(rows + item * n, n, to); },
                          out, 0);
}

// [samples, n]: each head's tokens by themselves, then the heads of a sample, which may be one
// subtree of `all_heads`.
Tensor sum_heads(const Tensor& spans, int64_t heads, int64_t all_heads, int64_t n,
                 const Quarters& quarters) {
  PlainArithmetic plain;
  const int64_t count = spans.size(0), *span = spans.const_data_ptr<int64_t>();
  const Schedule items = item_schedule(heads, feature_cap, all_heads);
  std::vector<float> totals(heads * n);
  Tensor out = empty_tensor({count, n}, at::kFloat);
  for (int64_t sample = 0, first = 0; sample < count; sample++) {
    Schedule tokens;
    push_run(tokens, span[2 * sample], span[2 * sample + 1], token_leaf, false);
    tokens.segment_end.push_back(tokens.leaves.size());
    ColumnSum(tokens, heads * n)
        .run([&](int64_t leaf, float* sum) { quarters.sum(first + leaf, 0, heads * n, sum); },
             totals.data(), 0);
    first += tokens.leaves.size();
    merge_items(totals.data(), n, items, out.mutable_data_ptr<float>() + sample * n);
  }
  return out;
}

// Of samples' totals [samples, n].
void merge_samples(const Tensor& totals, int64_t of, float* out) {
  PlainArithmetic plain;
  merge_items(totals.const_data_ptr<float>(), totals.size(1),
              item_schedule(totals.size(0), sample_cap, of), out);
}

std::vector<int64_t> tokens_outside(const Tensor& spans, int64_t tokens) {
  std::vector<bool> inside(tokens);
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); i++, span += 2)
    std::fill_n(inside.begin() + span[0], span[1], true);
  std::vector<int64_t> outside;
  for (int64_t t = 0; t < tokens; t++)
    if (!inside[t]) outside.push_back(t);
  return outside;
}

Tensor rounded(const float* sum, int64_t columns, at::ScalarType type) {
  Tensor out = empty_tensor({columns}, type);
  by_type(out, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    finish(sum, nullptr, nullptr, nullptr, columns, nullptr, 1, columns, out.mutable_data_ptr<T>(),
           columns);
  });
  return out;
}

Tensor fp32_vector(const Tensor& t) { return t.to(at::kFloat).contiguous(); }

// ---- operators
// -----------------------------------------------------------------------------------------

using Optional = std::optional<Tensor>;

void check_norm(const Tensor& x, const Tensor& weight, bool heads) {
  check_attested();
  TORCH_CHECK(
      x.dim() >= (heads ? 2 : 1) && weight.dim() == 1 && weight.size(0) == x.size(-1) &&
          x.size(-1) > 0 && weight.scalar_type() == x.scalar_type() && (!heads || x.size(-2) > 0),
      "isobit: expected x [..., n] and weight [n] of one dtype, received ", x.sizes(), " and ",
      weight.sizes(), "; remedy: call isobit.rms_norm or isobit.layer_norm, which say which");
}

// (y, means, scales); a root mean square has no means.
std::tuple<Tensor, Tensor, Tensor> normalise(const Tensor& x, const Tensor& weight,
                                             const Optional& bias, double eps, bool centred) {
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  const at::IntArrayRef leading = x.sizes().slice(0, x.dim() - 1);
  Tensor scales = empty_tensor(leading, at::kFloat),
         means = centred ? empty_tensor(leading, at::kFloat) : Tensor();
  if (out.numel() == 0) return {out, means, scales};
  const Tensor rows = rows_of(x), gain = fp32_vector(weight),
               shift = bias ? fp32_vector(*bias) : Tensor();
  const int64_t n = rows.size(1);
  const Schedule features = schedule_of(n);
  by_type(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Forward<T> pass{features,
                          n,
                          rows.const_data_ptr<T>(),
                          rows.stride(0),
                          gain.const_data_ptr<float>(),
                          bias ? shift.const_data_ptr<float>() : nullptr,
                          static_cast<float>(eps),
                          centred ? means.mutable_data_ptr<float>() : nullptr,
                          scales.mutable_data_ptr<float>(),
                          out.mutable_data_ptr<T>()};
    at::parallel_for(0, rows.size(0), std::max<int64_t>(grain / n, 1),
                     [&](int64_t begin, int64_t end) {
                       PlainArithmetic plain;
                       forward_rows(pass, begin, end);
                     });
  });
  return {out, means, scales};
}

// (dx, the quarters of every leaf of the samples); a root mean square has no means.
std::tuple<Tensor, Tensor> backward_rows(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                         const Optional& means, const Tensor& scales,
                                         const Tensor& spans, const Schedule& samples,
                                         bool by_heads) {
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() &&
                  scales.is_contiguous() && scales.numel() * x.size(-1) == x.numel() &&
                  scales.scalar_type() == at::kFloat &&
                  (!means || (means->is_contiguous() && means->numel() == scales.numel())),
              "isobit: expected a gradient like x, received ", grad.sizes(), " and ", x.sizes(),
              "; remedy: call isobit.rms_norm or isobit.layer_norm, and let autograd call this");
  const int64_t n = x.size(-1), heads = by_heads ? x.size(-2) : 1;
  const Schedule features = schedule_of(n);
  Tensor dx = empty_tensor(x.sizes(), x.scalar_type());
  const int64_t leaves = samples.leaves.size(), width = heads * n * (means ? 2 : 1);
  Tensor quarters = empty_tensor({leaves, 4, width}, at::kFloat);
  if (x.numel() == 0)
    return {dx, quarters.zero_()};  // samples without a token; no pointer below is one
  float* sums = quarters.mutable_data_ptr<float>();
  const Tensor left = rows_of(grad), right = rows_of(x), gain = fp32_vector(weight);
  by_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Backward<T> pass{features,
                           n,
                           heads,
                           left.const_data_ptr<T>(),
                           left.stride(0),
                           right.const_data_ptr<T>(),
                           right.stride(0),
                           gain.const_data_ptr<float>(),
                           means ? means->const_data_ptr<float>() : nullptr,
                           scales.const_data_ptr<float>(),
                           dx.mutable_data_ptr<T>()};
    const int64_t least = std::max<int64_t>(grain / (token_leaf / 4 * width), 1);
    at::parallel_for(0, 4 * leaves, least, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      PlainArithmetic plain;
      for (int64_t i = begin; i < end; i++)
        backward_some(pass, samples.leaves[i / 4], i % 4, scratch.floats(4 * width),
                      sums + i * width);
    });
    const std::vector<int64_t> padding = tokens_outside(spans, x.numel() / (heads * n));
    at::parallel_for(0, padding.size(), std::max<int64_t>(grain / width, 1),
                     [&](int64_t begin, int64_t end) {
                       PlainArithmetic plain;
                       for (int64_t i = begin; i < end; i++) backward_padding(pass, padding[i]);
                     });
  });
  return {dx, quarters};
}

Tensor described_spans(const Tensor& x, const Optional& spans, bool by_heads) {
  return spans_of(spans, x.sizes().slice(0, x.dim() - (by_heads ? 2 : 1)));
}

Schedule samples_schedule(const Tensor& spans, int64_t of) {
  return sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), 0, of);
}

// (dx, dweight, dbias); a root mean square has no bias.
std::tuple<Tensor, Tensor, Tensor> gradients(const Tensor& grad, const Tensor& x,
                                             const Tensor& weight, const Optional& means,
                                             const Tensor& scales, const Optional& spans,
                                             bool by_heads, int64_t of) {
  check_norm(x, weight, by_heads);
  const Tensor described = described_spans(x, spans, by_heads);
  const Batch batch = batch_of(described, of);
  const Schedule samples = samples_schedule(described, batch.of);
  auto [dx, quarters] = backward_rows(grad, x, weight, means, scales, described, samples, by_heads);
  const int64_t n = x.size(-1), heads = by_heads ? x.size(-2) : 1;
  const Quarters sums{quarters.mutable_data_ptr<float>(), quarters.size(2)};
  std::vector<float> total(means ? 2 * n : n, 0.0f);
  if (by_heads)
    merge_samples(sum_heads(described, heads, heads, n, sums), batch.of, total.data());
  else
    sum_samples(samples, sums, total.data());
  const at::ScalarType type = batch.type(x.scalar_type());
  return {dx, rounded(total.data(), n, type),
          means ? rounded(total.data() + n, n, type) : Tensor()};
}

// (dx, each sample's total of these heads), of heads that are one subtree of `all_heads`.
std::tuple<Tensor, Tensor> rms_norm_sample_grads(const Tensor& grad, const Tensor& x,
                                                 const Tensor& weight, const Tensor& scales,
                                                 const Tensor& spans, int64_t all_heads) {
  check_norm(x, weight, true);
  TORCH_CHECK(is_subtree(x.size(-2), all_heads, feature_cap),
              "isobit: expected heads that are one subtree of ", all_heads, ", received ",
              x.size(-2), "; remedy: call isobit.ops.rms_norm.partial");
  const Tensor described = described_spans(x, spans, true);
  const Schedule samples = samples_schedule(described, described.size(0));
  auto [dx, quarters] = backward_rows(grad, x, weight, {}, scales, described, samples, true);
  return {dx, sum_heads(described, x.size(-2), all_heads, x.size(-1),
                        {quarters.mutable_data_ptr<float>(), quarters.size(2)})};
}

Tensor rms_norm_merge_samples(const Tensor& totals, int64_t of) {
  check_attested();
  TORCH_CHECK(totals.dim() == 2 && totals.scalar_type() == at::kFloat &&
                  (of == 0 || is_subtree(totals.size(0), of, sample_cap)),
              "isobit: expected fp32 totals [samples, n] of one subtree of ", of,
              " samples, received ", totals.sizes(), " ", totals.scalar_type(),
              "; remedy: call isobit.ops.rms_norm.partial");
  Tensor out = empty_tensor({totals.size(1)}, at::kFloat).zero_();
  merge_samples(totals.contiguous(), of ? of : totals.size(0), out.mutable_data_ptr<float>());
  return out;
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps,
                                    const Optional&, bool heads, int64_t) {
  check_norm(x, weight, heads);
  auto [y, means, scales] = normalise(x, weight, {}, eps, false);
  return {y, scales};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x,
                                             const Tensor& weight, const Tensor& scales,
                                             const Optional& spans, bool heads, int64_t of) {
  auto [dx, dweight, dbias] = gradients(grad, x, weight, {}, scales, spans, heads, of);
  return {dx, dweight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight,
                                              const Optional& bias, double eps, const Optional&,
                                              int64_t) {
  check_norm(x, weight, false);
  if (bias) check_norm(x, *bias, false);
  return normalise(x, weight, bias, eps, true);
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, const Tensor& means,
                                                       const Tensor& scales, const Optional& spans,
                                                       int64_t of) {
  return gradients(grad, x, weight, means, scales, spans, false, of);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "rms_norm(Tensor x, Tensor weight, float eps=1e-6, Tensor? spans=None, bool heads=False, int "
      "of=0) -> "
      "(Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor? spans, bool "
      "heads, int of=0) -> "
      "(Tensor, Tensor)");
  m.def(
      "rms_norm_sample_grads(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor spans, "
      "int all_heads) -> "
      "(Tensor, Tensor)");
  m.def("rms_norm_merge_samples(Tensor totals, int of) -> Tensor");
  m.def(
      "layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5, Tensor? spans=None, "
      "int of=0) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor means, Tensor scales, "
      "Tensor? spans, "
      "int of=0) -> (Tensor, Tensor, Tensor)");
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
