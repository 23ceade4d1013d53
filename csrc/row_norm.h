// One row of a root-mean-square or layer norm: its statistics, its output, its gradient.
//
// With x̂ = (x − mean)·scale (a root mean square has no mean) and a = grad·weight, every operation
// rounded:
//   y  = x̂·weight (+ bias)
//   dx = scale·((a − Σa/n) − x̂·(Σ(a·x̂)/n)); without a mean, scale·(a − x̂·(Σ(a·x̂)/n))
//   dweight = Σ grad·x̂ and dbias = Σ grad over tokens, in the order of the samples
#pragma once

#include <cmath>

#include "rows.h"

namespace isobit {

// ---- one row
// -------------------------------------------------------------------------------------------

// Lanes after the last element add +0, whatever infinity the row's statistics are.
ISOBIT_INLINE void clear_rest(int64_t count, Floats& values) {
  if (count < lane_count)
    for (int64_t i = count; i < lane_count; i++) values[i] = 0.0f;
}

template <bool centred, class T>
struct Squares {
  const T* x;
  float mean;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    widen_some(x + at, count, 0.0f, values);
    if (centred) {
      values = values - mean;
      clear_rest(count, values);
    }
    values = values * values;
  }
};

template <bool centred, class T>
struct Normal {
  const T* x;
  float mean, scale;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    widen_some(x + at, count, 0.0f, values);
    if (centred) values = values - mean;
    values = values * scale;
  }
};

template <class T>
struct Weighted {
  const T* grad;
  const float* weight;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    Floats factor;
    widen_some(grad + at, count, 0.0f, values);
    widen_some(weight + at, count, 0.0f, factor);
    values = values * factor;
  }
};

// The terms a·x̂, each product rounded; of a centred row also a itself.
template <bool centred, class T>
struct Slopes {
  Weighted<T> weighted;
  Normal<centred, T> normal;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count,
                                Floats (&values)[centred ? 2 : 1]) const {
    Floats factor;
    weighted(at, count, factor);
    normal(at, count, values[0]);
    values[0] = factor * values[0];
    clear_rest(count, values[0]);
    if constexpr (centred) values[1] = factor;
  }
};

ISOBIT_INLINE void add_some(const Floats& values, int64_t count, float* to) {
  Floats sum;
  widen_some(to, count, 0.0f, sum);
  sum = sum + values;
  if (count == lane_count)
    *reinterpret_cast<Floats*>(to) = sum;
  else
    for (int64_t i = 0; i < count; i++) to[i] = sum[i];
}

// ---- forward
// -------------------------------------------------------------------------------------------

template <class T>
struct Forward {
  const Schedule& features;
  int64_t n;
  const T* x;
  int64_t stride;
  const float *weight, *bias;  // no bias: null
  float eps;
  float *means, *scales;  // no means: a root mean square
  T* out;
};

template <bool centred, class T>
ISOBIT_INLINE void forward_row(const Forward<T>& pass, int64_t row) {
  const int64_t n = pass.n;
  const T* x = pass.x + row * pass.stride;
  const float length = static_cast<float>(n),
              mean = centred ? sum_row(pass.features, Elements<T>{x}) / length : 0.0f;
  const float scale =
      1.0f / std::sqrt(sum_row(pass.features, Squares<centred, T>{x, mean}) / length + pass.eps);
  const Normal<centred, T> normal{x, mean, scale};
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values, other;
    normal(at, count, values);
    widen_some(pass.weight + at, count, 0.0f, other);
    values = values * other;
    if (pass.bias) {
      widen_some(pass.bias + at, count, 0.0f, other);
      values = values + other;
    }
    round_some(values, count, pass.out + row * n + at);
  }
  if (centred) pass.means[row] = mean;
  pass.scales[row] = scale;
}

// ---- backward
// ------------------------------------------------------------------------------------------

template <class T>
struct Backward {
  const Schedule& features;
  int64_t n, heads;  // rows of a token
  const T* grad;
  int64_t grad_stride;
  const T* x;
  int64_t x_stride;
  const float *weight, *means, *scales;
  T* out;
  int64_t width() const {
    return heads * n * (means ? 2 : 1);
  }  // sums of a token: dweight, and dbias after it
};

// dx of a row; its terms of dweight and dbias go to `lane`, if that is not null.
template <bool centred, class T>
ISOBIT_INLINE void backward_row(const Backward<T>& pass, int64_t row, int64_t next, float* lane) {
  const int64_t n = pass.n;
  const float length = static_cast<float>(n), scale = pass.scales[row];
  const Normal<centred, T> normal{pass.x + row * pass.x_stride, centred ? pass.means[row] : 0.0f,
                                  scale};
  const Weighted<T> weighted{pass.grad + row * pass.grad_stride, pass.weight};
  float sums[centred ? 2 : 1];
  sum_row_into(pass.features, Slopes<centred, T>{weighted, normal}, sums);
  const float slope = sums[0] / length, level = centred ? sums[centred] / length : 0.0f;
  // Rows of a quarter are not all neighbours, so the processor does not see the next one coming.
  const T *next_grad = pass.grad + next * pass.grad_stride, *next_x = pass.x + next * pass.x_stride;
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    __builtin_prefetch(next_grad + at);
    __builtin_prefetch(next_x + at);
    Floats grad, factor, values, along;
    widen_some(weighted.grad + at, count, 0.0f, grad);
    widen_some(pass.weight + at, count, 0.0f, factor);
    normal(at, count, along);
    values = grad * factor;
    if (centred) values = values - level;
    values = (values - along * slope) * scale;
    round_some(values, count, pass.out + row * n + at);
    if (!lane) continue;
    along = grad * along;
    add_some(along, count, lane + at);
    if (centred) add_some(grad, count, lane + n + at);
  }
}

// A quarter of a leaf: the tokens of lanes 4q to 4q + 3, merged. Four lanes stay in the nearest
// cache, and a leaf occupies four threads.
template <bool centred, class T>
ISOBIT_INLINE void backward_quarter(const Backward<T>& pass, const Leaf& leaf, int64_t quarter,
                                    float* lanes, float* sum) {
  const int64_t width = pass.width();
  std::fill(lanes, lanes + 4 * width, 0.0f);
  for (int64_t t = 4 * quarter, next; t < leaf.length; t = next) {
    next = t % 4 == 3 ? t + lane_count - 3 : t + 1;
    const int64_t row = (leaf.start + t) * pass.heads,
                  ahead = ((next < leaf.length ? next : t) - t) * pass.heads;
    for (int64_t h = 0; h < pass.heads; h++)
      backward_row<centred>(pass, row + h, row + h + ahead, lanes + t % 4 * width + h * pass.n);
  }
  for (int64_t i = 0; i < width; i++)
    sum[i] = (lanes[i] + lanes[width + i]) + (lanes[2 * width + i] + lanes[3 * width + i]);
}

}  // namespace isobit
