// Softmax over the last axis, and its gradient: elementwise work around the row sums of order.h.
#include "softmax.h"

#include <ATen/Parallel.h>

#include "exponential.h"
#include "rows.h"

namespace isobit {

namespace {

// One row's exponentials over their sum. A NaN among them has reached the sum.
template <class T>
struct Quotients {
  const float* kept;
  float total;
  T* out;
  ISOBIT_INLINE void store(int64_t at, int64_t count) const {
    Floats values;
    widen_some(kept + at, count, 0.0f, values);
    values = values / total;
    round_some(values, count, out + at);
  }
};

// The terms of the denominator, kept in place of the row's before, whose quotients are taken first:
// a division occupies a unit that the exponential leaves idle.
template <class T>
struct Exponentials {
  const T* x;
  float max;
  float* kept;
  Quotients<T> before;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    if (before.out) before.store(at, count);
    widen_some(x + at, count, -infinity, values);
    values = values - max;
    exp_nonpositive(values);
    round_some(values, count, kept + at);
  }
};

template <class T>
ISOBIT_INLINE void softmax_all(const Schedule& schedule, const T* x, int64_t stride, int64_t rows,
                               int64_t n, float* kept, T* out) {
  Quotients<T> before{kept, 1.0f, nullptr};
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * stride;
    const float total = sum_row(schedule, Exponentials<T>{from, max_of_row(from, n), kept, before});
    before = {kept, total, out + row * n};
  }
  for (int64_t at = 0; at < n; at += lane_count) before.store(at, std::min(lane_count, n - at));
}

template <class T>
ISOBIT_INLINE void backward_row(const Schedule& schedule, const T* grad, const T* y, int64_t n,
                                T* out) {
  const float total = sum_row(schedule, ProductTerms<T>{y, grad});
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values, factor;
    widen_some(y + at, count, 0.0f, factor);
    widen_some(grad + at, count, 0.0f, values);
    values = factor * (values - total);
    round_some(values, count, out + at);
  }
}

#define ISOBIT_ROWS(T)                                                                           \
  ISOBIT_CLONES void softmax_rows(const Schedule& schedule, const T* x, int64_t stride,          \
                                  int64_t rows, int64_t n, float* kept, T* __restrict out) {     \
    softmax_all(schedule, x, stride, rows, n, kept, out);                                        \
  }                                                                                              \
  ISOBIT_CLONES void backward_rows(const Schedule& schedule, const T* grad, int64_t grad_stride, \
                                   const T* y, int64_t y_stride, int64_t rows, int64_t n,        \
                                   T* __restrict out) {                                          \
    for (int64_t row = 0; row < rows; row++)                                                     \
      backward_row(schedule, grad + row * grad_stride, y + row * y_stride, n, out + row * n);    \
  }
ISOBIT_ROWS(float)
ISOBIT_ROWS(BFloat16)
ISOBIT_ROWS(Half)

}  // namespace

Tensor softmax(const Tensor& x) {
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor rows = rows_of(x);
  const int64_t n = rows.size(1);
  const Schedule schedule = schedule_of(n);
  by_type(rows, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = rows.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t stride = rows.stride(0);
    at::parallel_for(0, rows.size(0), std::max<int64_t>(grain / n, 1),
                     [&](int64_t begin, int64_t end) {
                       thread_local Scratch scratch;
                       PlainArithmetic plain;
                       softmax_rows(schedule, from + begin * stride, stride, end - begin, n,
                                    scratch.floats(n), to + begin * n);
                     });
  });
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& y) {
  Tensor out = empty_tensor(y.sizes(), y.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor left = rows_of(grad), right = rows_of(y);
  const int64_t n = left.size(1);
  const Schedule schedule = schedule_of(n);
  by_type(left, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T *from = left.const_data_ptr<T>(), *saved = right.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t stride = left.stride(0), step = right.stride(0);
    at::parallel_for(0, left.size(0), std::max<int64_t>(grain / n, 1),
                     [&](int64_t begin, int64_t end) {
                       PlainArithmetic plain;
                       backward_rows(schedule, from + begin * stride, stride, saved + begin * step,
                                     step, end - begin, n, to + begin * n);
                     });
  });
  return out;
}

}  // namespace isobit
