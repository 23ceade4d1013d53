// Log-softmax over the last axis, and its gradient.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "log_sum_exp.h"

namespace isobit {

namespace {

// (x − max) − log_sum, for write_row.
template <class T>
struct Shifted {
  const T* x;  // [n]
  float max, log_sum;
  template <class Place, class Vector>
  ISOBIT_INLINE void operator()(const Place& place, Vector& values) const {
    place.read(x, values);
    values = (values - max) - log_sum;
  }
};

// out = x − max − log Σ exp(x − max). The logarithms of 16 short rows are computed side by side;
// long rows are taken one by one, because 16 of them would leave the nearest cache.
//   x    [rows][n]
//   out  [rows][n], contiguous
template <bool four, class T>
ISOBIT_INLINE void log_softmax_of_rows(const Schedule& schedule, RowMajor<const T> x, int64_t rows,
                                       int64_t n, T* out) {
  const int64_t together = n <= 256 ? lane_count : 1;
  float max[lane_count], sum[lane_count];
  for (int64_t i = 0; i < lane_count; i++) sum[i] = 1.0f;
  for (int64_t begin = 0; begin < rows; begin += together) {
    const int64_t count = std::min(together, rows - begin);
    for (int64_t i = 0; i < count; i++) {
      MaxSumTree tree;
      tree.add<four>(schedule, x.row(begin + i));
      max[i] = tree.total().max;
      sum[i] = tree.total().sum;
    }
    Floats logs;
    load(sum, logs);
    log_positive(logs);
    for (int64_t i = 0; i < count; i++)
      write_row<four>(n, Shifted<T>{x.row(begin + i), max[i], logs[i]}, out + (begin + i) * n);
  }
}

// grad − exp(y) · Σ grad, for write_row.
template <class T>
struct LogSoftmaxGrad {
  const T* grad;  // [n]
  const T* y;     // [n]
  float total;
  template <class Place, class Vector>
  ISOBIT_INLINE void operator()(const Place& place, Vector& values) const {
    Vector weights;
    place.read(grad, values);
    place.read(y, weights);
    exp_nonpositive(weights);
    values = values - weights * total;
  }
};

// All are [n].
template <bool four, class T>
ISOBIT_INLINE void grad_of_row(const Schedule& schedule, const T* grad, const T* y, int64_t n,
                               T* out) {
  const float total = sum_row<four>(schedule, ElementTerms<T>{grad});
  write_row<four>(n, LogSoftmaxGrad<T>{grad, y, total}, out);
}

#define ISOBIT_LOG_SOFTMAX(versions, four, T)                                                   \
  versions void log_softmax_rows(std::bool_constant<four>, const Schedule& schedule,            \
                                 RowMajor<const T> x, int64_t rows, int64_t n,                  \
                                 T* __restrict out) {                                           \
    log_softmax_of_rows<four>(schedule, x, rows, n, out);                                       \
  }                                                                                             \
  versions void grad_rows(std::bool_constant<four>, const Schedule& schedule,                   \
                          RowMajor<const T> grad, RowMajor<const T> y, int64_t rows, int64_t n, \
                          T* __restrict out) {                                                  \
    for (int64_t row = 0; row < rows; row++)                                                    \
      grad_of_row<four>(schedule, grad.row(row), y.row(row), n, out + row * n);                 \
  }
ISOBIT_VERSIONS(ISOBIT_LOG_SOFTMAX, float)
ISOBIT_VERSIONS(ISOBIT_LOG_SOFTMAX, BFloat16)
ISOBIT_VERSIONS(ISOBIT_LOG_SOFTMAX, Half)

Tensor log_softmax(const Tensor& x) {
  check_attested();
  ISOBIT_CHECK(x.dim() >= 1, "log_softmax", "at least one axis", describe(x),
               "call isobit.log_softmax");
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor rows = as_rows(x);
  const int64_t n = rows.size(1);
  const Schedule schedule = feature_schedule(n);
  dispatch_dtype("log_softmax", x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const RowMajor<const T> src = row_data<T>(rows);  // [rows][n]
    T* dst = out.mutable_data_ptr<T>();               // [rows][n]
    at::parallel_for(0, rows.size(0), row_grain(n), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      call_version([&](auto four) {
        log_softmax_rows(four, schedule, {src.row(begin), src.stride}, end - begin, n,
                         dst + begin * n);
      });
    });
  });
  return out;
}

Tensor log_softmax_backward(const Tensor& grad, const Tensor& y) {
  check_attested();
  ISOBIT_CHECK(y.dim() >= 1 && grad.sizes() == y.sizes() && grad.scalar_type() == y.scalar_type(),
               "log_softmax", c10::str("a gradient like the output, ", describe(y)), describe(grad),
               "call isobit.log_softmax, and let autograd call this");
  Tensor out = empty_tensor(y.sizes(), y.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor grads = as_rows(grad), outputs = as_rows(y);
  const int64_t n = grads.size(1);
  const Schedule schedule = feature_schedule(n);
  dispatch_dtype("log_softmax", y.scalar_type(), [&](auto tag) {
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
  m.def("log_softmax(Tensor x) -> Tensor");
  m.def("log_softmax_backward(Tensor grad, Tensor y) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("log_softmax", &log_softmax);
  m.impl("log_softmax_backward", &log_softmax_backward);
}

}  // namespace isobit
