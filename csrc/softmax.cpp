// Softmax over the last axis, and its gradient: elementwise work around the row sums of sums.h.
//
// Softmax does not use the tile engine, so it runs with oneDNN disabled too.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "exponential.h"
#include "rows.h"

namespace isobit {

namespace {

// The quotients of one row: exponentials over their sum. A NaN among them has reached the sum.
template <class T>
struct Quotients {
  const float* exponentials;  // [n]
  float total;
  T* out;  // [n], or null if there is no row
  ISOBIT_INLINE void store(int64_t at, int64_t count) const {
    Floats values;
    load_lanes(exponentials + at, count, 0.0f, values);
    values = values / total;
    store_lanes(values, count, out + at);
  }
  ISOBIT_INLINE void store_four(int64_t at) const {
    Floats4 values;
    load(exponentials + at, values);
    values = values / total;
    round_to(values, out + at);
  }
};

// The terms exp(x - max) of the denominator, kept for the quotients. They overwrite those of the
// previous row, whose quotients are stored first: a division uses a unit that the exponential
// leaves idle.
template <class T>
struct SoftmaxTerms {
  const T* x;  // [n]
  float max;
  float* exponentials;  // [n]
  Quotients<T> previous;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    if (previous.out) previous.store(at, count);
    load_lanes(x + at, count, -infinity, values);
    values = values - max;
    exp_nonpositive(values);
    store_lanes(values, count, exponentials + at);
  }
  ISOBIT_INLINE void four(int64_t at, Floats4& values) const {
    if (previous.out) previous.store_four(at);
    load(x + at, values);
    values = values - max;
    exp_nonpositive(values);
    round_to(values, exponentials + at);
  }
};

//   x             [rows][n]
//   exponentials  [n], scratch
//   out           [rows][n], contiguous
template <bool four, class T>
ISOBIT_INLINE void softmax_of_rows(const Schedule& schedule, RowMajor<const T> x, int64_t rows,
                                   int64_t n, float* exponentials, T* out) {
  Quotients<T> previous{exponentials, 1.0f, nullptr};
  for (int64_t row = 0; row < rows; row++) {
    const T* src = x.row(row);  // [n]
    const float total =
        sum_row<four>(schedule, SoftmaxTerms<T>{src, max_of_row(src, n), exponentials, previous});
    previous = {exponentials, total, out + row * n};
  }
  for (int64_t at = 0; at < n; at += lane_count) previous.store(at, std::min(lane_count, n - at));
}

// y · (grad − Σ y · grad), for write_row.
template <class T>
struct SoftmaxGrad {
  const T* grad;  // [n]
  const T* y;     // [n]
  float total;
  template <class Place, class Vector>
  ISOBIT_INLINE void operator()(const Place& place, Vector& values) const {
    Vector factor;
    place.read(y, factor);
    place.read(grad, values);
    values = factor * (values - total);
  }
};

// All are [n].
template <bool four, class T>
ISOBIT_INLINE void grad_of_row(const Schedule& schedule, const T* grad, const T* y, int64_t n,
                               T* out) {
  const float total = sum_row<four>(schedule, ProductTerms<T>{y, grad});
  write_row<four>(n, SoftmaxGrad<T>{grad, y, total}, out);
}

#define ISOBIT_SOFTMAX(versions, four, T)                                                       \
  versions void softmax_rows(std::bool_constant<four>, const Schedule& schedule,                \
                             RowMajor<const T> x, int64_t rows, int64_t n, float* exponentials, \
                             T* __restrict out) {                                               \
    softmax_of_rows<four>(schedule, x, rows, n, exponentials, out);                             \
  }                                                                                             \
  versions void grad_rows(std::bool_constant<four>, const Schedule& schedule,                   \
                          RowMajor<const T> grad, RowMajor<const T> y, int64_t rows, int64_t n, \
                          T* __restrict out) {                                                  \
    for (int64_t row = 0; row < rows; row++)                                                    \
      grad_of_row<four>(schedule, grad.row(row), y.row(row), n, out + row * n);                 \
  }
ISOBIT_VERSIONS(ISOBIT_SOFTMAX, float)
ISOBIT_VERSIONS(ISOBIT_SOFTMAX, BFloat16)
ISOBIT_VERSIONS(ISOBIT_SOFTMAX, Half)

Tensor softmax(const Tensor& x) {
  check_attested();
  ISOBIT_CHECK(x.dim() >= 1, "softmax", "at least one axis", describe(x), "call isobit.softmax");
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor rows = as_rows(x);
  const int64_t n = rows.size(1);
  const Schedule schedule = feature_schedule(n);
  dispatch_dtype("softmax", x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowMajor<const T> src = row_data<T>(rows);  // [rows][n]
    T* dst = out.mutable_data_ptr<T>();               // [rows][n]
    at::parallel_for(0, rows.size(0), row_grain(n), [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      FixedFpEnvironment fp_environment;
      call_version([&](auto four) {
        softmax_rows(four, schedule, {src.row(begin), src.stride}, end - begin, n,
                     scratch.floats(n), dst + begin * n);
      });
    });
  });
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& y) {
  check_attested();
  ISOBIT_CHECK(y.dim() >= 1 && grad.sizes() == y.sizes() && grad.scalar_type() == y.scalar_type(),
               "softmax", c10::str("a gradient like the output, ", describe(y)), describe(grad),
               "call isobit.softmax, and let autograd call this");
  Tensor out = empty_tensor(y.sizes(), y.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor grads = as_rows(grad), outputs = as_rows(y);
  const int64_t n = grads.size(1);
  const Schedule schedule = feature_schedule(n);
  dispatch_dtype("softmax", y.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowMajor<const T> g = row_data<T>(grads), saved = row_data<T>(outputs);  // [rows][n]
    T* dst = out.mutable_data_ptr<T>();                                            // [rows][n]
    at::parallel_for(0, grads.size(0), row_grain(n), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      call_version([&](auto four) {
        grad_rows(four, schedule, {g.row(begin), g.stride}, {saved.row(begin), saved.stride},
                  end - begin, n, dst + begin * n);
      });
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor grad, Tensor y) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("softmax", &softmax);
  m.impl("softmax_backward", &softmax_backward);
}

}  // namespace isobit
