// The gradients of a linear layer's weight and bias: sums over the tokens, sample by sample.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "engine.h"
#include "fp_environment.h"
#include "linear.h"
#include "samples.h"
#include "sums.h"

namespace isobit {

namespace {

using OptionalTensor = std::optional<Tensor>;

// [N, K], or [roots, N, K]. `axis` counts samples.
Tensor weight_grad(const Tensor& grad, const Tensor& x, const Tensor& spans,
                   const SummedAxis& axis) {
  const at::ScalarType dtype = engine_dtype(x.scalar_type());
  const Tensor left = as_matrix(grad, dtype), right = as_matrix(x, dtype);
  const Schedule schedule = sample_schedule(spans, axis.first, axis.extent);
  ProductSpec spec{schedule, left.size(1), right.size(1), axis.output_dtype(x.scalar_type()),
                   axis.returns_roots};
  // The left operand of the product is copied as a whole: let it be the smaller one.
  spec.swap_operands = right.size(1) < left.size(1);
  return multiply(left, 0, right, 0, spec);
}

// Sums columns [begin, end) of rows [tokens, N] into out [roots][N], row stride = N.
template <class T>
void sum_columns(const Tensor& rows, const Schedule& schedule, int64_t begin, int64_t end,
                 float* out) {
  constexpr int64_t block = 256;
  const T* data = rows.const_data_ptr<T>();  // [tokens][N], row stride = rows.stride(0)
  for (int64_t at = begin; at < end; at += block) {
    ColumnSum sum(schedule, std::min(block, end - at));
    sum.run(data + at, rows.stride(0), out + at, rows.size(1));
  }
}

// [N], or [roots, N]. `axis` counts samples.
Tensor bias_grad(const Tensor& grad, const Tensor& spans, const SummedAxis& axis) {
  Tensor rows = as_matrix(grad, grad.scalar_type());
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const Schedule schedule = sample_schedule(spans, axis.first, axis.extent);
  const int64_t cols = rows.size(1);
  const int64_t roots = count_roots(schedule.first_segment, schedule.segment_count());
  Tensor sums = empty_tensor({roots, cols}, at::kFloat);
  float* data = sums.mutable_data_ptr<float>();  // [roots][cols]
  dispatch_dtype("linear", rows.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    at::parallel_for(0, cols, 256, [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      sum_columns<T>(rows, schedule, begin, end, data);
    });
  });
  if (axis.returns_roots) return sums;
  Tensor rounded = empty_tensor({cols}, grad.scalar_type());
  if (roots == 0) return rounded.zero_();  // a batch without samples
  dispatch_dtype("linear", grad.scalar_type(), [&](auto tag) {
    round_sums(data, cols, rounded.mutable_data_ptr<typename decltype(tag)::type>());
  });
  return rounded;
}

// A share of the batch is one subtree: drops the axis of its single root.
Tensor drop_root_axis(const Tensor& out, const GlobalBatch& batch) {
  return batch.is_share() ? out.select(0, 0) : out;
}

Tensor weight_grad_op(const Tensor& grad, const Tensor& x, const OptionalTensor& spans,
                      int64_t of) {
  check_engine();
  const Tensor known_spans = spans_or_default("linear", spans, leading_axes(grad));
  check_spans("linear", known_spans, c10::multiply_integers(leading_axes(x)));
  const GlobalBatch batch = global_batch("linear", known_spans, of);
  return drop_root_axis(
      weight_grad(grad, x, known_spans, {batch.global_samples, 0, batch.is_share()}), batch);
}

Tensor weight_grad_roots_op(const Tensor& grad, const Tensor& x, const Tensor& spans, int64_t first,
                            int64_t of) {
  check_engine();
  check_spans("linear", spans, c10::multiply_integers(leading_axes(grad)));
  check_spans("linear", spans, c10::multiply_integers(leading_axes(x)));
  return weight_grad(grad, x, spans, {of, first, true});
}

Tensor bias_grad_op(const Tensor& grad, const OptionalTensor& spans, int64_t of) {
  check_engine();
  const Tensor known_spans = spans_or_default("linear", spans, leading_axes(grad));
  const GlobalBatch batch = global_batch("linear", known_spans, of);
  return drop_root_axis(bias_grad(grad, known_spans, {batch.global_samples, 0, batch.is_share()}),
                        batch);
}

Tensor bias_grad_roots_op(const Tensor& grad, const Tensor& spans, int64_t first, int64_t of) {
  check_engine();
  check_spans("linear", spans, c10::multiply_integers(leading_axes(grad)));
  return bias_grad(grad, spans, {of, first, true});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("linear_weight_grad(Tensor grad, Tensor x, Tensor? spans, int of=0) -> Tensor");
  m.def(
      "linear_weight_grad_roots(Tensor grad, Tensor x, Tensor spans, int first, int of) "
      "-> Tensor");
  m.def("linear_bias_grad(Tensor grad, Tensor? spans, int of=0) -> Tensor");
  m.def("linear_bias_grad_roots(Tensor grad, Tensor spans, int first, int of) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear_weight_grad", &weight_grad_op);
  m.impl("linear_weight_grad_roots", &weight_grad_roots_op);
  m.impl("linear_bias_grad", &bias_grad_op);
  m.impl("linear_bias_grad_roots", &bias_grad_roots_op);
}

}  // namespace isobit
