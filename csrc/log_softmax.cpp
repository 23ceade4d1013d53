// log-softmax over the last axis, and its gradient: the log-sum-exp's pairs, then elementwise work.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attested.h"
#include "log_sum_exp.h"

namespace isobit {

namespace {

template <class T>
ISOBIT_INLINE void forward_row(const Schedule& schedule, const T* x, int64_t n, T* out) {
  PairFold fold;
  int64_t segment = 0;
  for (int64_t leaf = 0; leaf < static_cast<int64_t>(schedule.leaves.size()); leaf++) {
    const auto [start, length, onto] = schedule.leaves[leaf];
    const bool ends = leaf + 1 == schedule.segment_end[segment];
    fold.add(leaf_pair(x + start, length), onto, ends);
    segment += ends;
  }
  const float max = fold.total().max, log_sum = log_of(fold.total().sum);
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values;
    widen_some(x + at, count, 0.0f, values);
    round_some((values - max) - log_sum, count, out + at);
  }
}

// g − exp(y) Σg
template <class T>
ISOBIT_INLINE void backward_row(const Schedule& schedule, const T* grad, const T* y, int64_t n,
                                T* out) {
  const float total = sum_row(schedule, Elements<T>{grad});
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values, weights;
    widen_some(grad + at, count, 0.0f, values);
    widen_some(y + at, count, 0.0f, weights);
    exp_nonpositive(weights);
    round_some(values - weights * total, count, out + at);
  }
}

#define ISOBIT_ROWS(T)                                                                        \
  ISOBIT_CLONES void log_softmax_rows(const Schedule& schedule, const T* x, int64_t stride,   \
                                      int64_t rows, int64_t n, T* __restrict out) {           \
    for (int64_t row = 0; row < rows; row++)                                                  \
      forward_row(schedule, x + row * stride, n, out + row * n);                              \
  }                                                                                           \
  ISOBIT_CLONES void log_softmax_grads(const Schedule& schedule, const T* grad,               \
                                       int64_t grad_stride, const T* y, int64_t y_stride,     \
                                       int64_t rows, int64_t n, T* __restrict out) {          \
    for (int64_t row = 0; row < rows; row++)                                                  \
      backward_row(schedule, grad + row * grad_stride, y + row * y_stride, n, out + row * n); \
  }
ISOBIT_ROWS(float)
ISOBIT_ROWS(BFloat16)
ISOBIT_ROWS(Half)

Tensor log_softmax_op(const Tensor& x) {
  check_attested();
  TORCH_CHECK(
      x.dim() >= 1,
      "isobit: expected an axis to sum over, received a scalar; remedy: call isobit.log_softmax");
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor rows = rows_of(x);
  const int64_t n = rows.size(1), stride = rows.stride(0);
  const Schedule schedule = schedule_of(n);
  by_type(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = rows.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(
        0, rows.size(0), std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
          PlainArithmetic plain;
          log_softmax_rows(schedule, from + begin * stride, stride, end - begin, n, to + begin * n);
        });
  });
  return out;
}

Tensor log_softmax_backward_op(const Tensor& grad, const Tensor& y) {
  check_attested();
  TORCH_CHECK(y.dim() >= 1 && grad.sizes() == y.sizes() && grad.scalar_type() == y.scalar_type(),
              "isobit: expected a gradient like the output; remedy: call isobit.log_softmax, and "
              "let autograd call this");
  Tensor out = empty_tensor(y.sizes(), y.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor left = rows_of(grad), right = rows_of(y);
  const int64_t n = left.size(1), stride = left.stride(0), step = right.stride(0);
  const Schedule schedule = schedule_of(n);
  by_type(left, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T *from = left.const_data_ptr<T>(), *saved = right.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(
        0, left.size(0), std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
          PlainArithmetic plain;
          log_softmax_grads(schedule, from + begin * stride, stride, saved + begin * step, step,
                            end - begin, n, to + begin * n);
        });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("log_softmax(Tensor x) -> Tensor");
  m.def("log_softmax_backward(Tensor grad, Tensor y) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("log_softmax", &log_softmax_op);
  m.impl("log_softmax_backward", &log_softmax_backward_op);
}

}  // namespace isobit
