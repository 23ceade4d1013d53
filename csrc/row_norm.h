// One row of a root-mean-square or layer norm: statistics, output and gradient.
//
// With x̂ = (x − mean)·scale (a root-mean-square norm has no mean) and a = grad·weight, where every
// operation is rounded:
//   y  = x̂·weight (+ bias)
//   dx = scale·((a − Σa/n) − x̂·(Σ(a·x̂)/n)); without a mean, scale·(a − x̂·(Σ(a·x̂)/n))
//   dweight = Σ grad·x̂ and dbias = Σ grad over tokens, in the order of the samples
// In the code, `centred` means that the norm has a mean.
#pragma once

#include <cmath>

#include "rows.h"

namespace isobit {

// Sets the lanes from `count` on to +0, whatever the row's statistics made of them.
ISOBIT_INLINE void clear_lanes_after(int64_t count, Floats& values) {
  if (count < lane_count)
    for (int64_t i = count; i < lane_count; i++) values[i] = 0.0f;
}

// The terms (x − mean)² (see [Note: terms] in sums.h).
template <bool centred, class T>
struct SquareTerms {
  const T* x;  // [n]
  float mean;
  ISOBIT_INLINE void four(int64_t at, Floats4& values) const {
    load(x + at, values);
    if (centred) values = values - mean;
    values = values * values;
  }
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    load_lanes(x + at, count, 0.0f, values);
    if (centred) {
      values = values - mean;
      clear_lanes_after(count, values);
    }
    values = values * values;
  }
};

// The values x̂.
template <bool centred, class T>
struct Normalised {
  const T* x;  // [n]
  float mean, scale;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    load_lanes(x + at, count, 0.0f, values);
    if (centred) values = values - mean;
    values = values * scale;
  }
};

// The values a = grad·weight.
template <class T>
struct WeightedGrad {
  const T* grad;        // [n]
  const float* weight;  // [n]
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    Floats factor;
    load_lanes(grad + at, count, 0.0f, values);
    load_lanes(weight + at, count, 0.0f, factor);
    values = values * factor;
  }
};

// The terms a·x̂; of a centred norm also a.
template <bool centred, class T>
struct GradTerms {
  WeightedGrad<T> weighted;
  Normalised<centred, T> normalised;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count,
                                Floats (&values)[centred ? 2 : 1]) const {
    Floats factor;
    weighted(at, count, factor);
    normalised(at, count, values[0]);
    values[0] = factor * values[0];
    clear_lanes_after(count, values[0]);
    if constexpr (centred) values[1] = factor;
  }
};

// lane = lane + values, for the first `count` lanes; `lane` is [count].
// Order: one token of a leaf of the sample schedule, in lane token % 16.
ISOBIT_INLINE void add_to_lane(const Floats& values, int64_t count, float* lane) {
  Floats sum;
  load_lanes(lane, count, 0.0f, sum);
  sum += values;
  if (count == lane_count)
    *reinterpret_cast<Floats*>(lane) = sum;
  else
    for (int64_t i = 0; i < count; i++) lane[i] = sum[i];
}

// Rows of n elements. No pointer is owned.
template <class T>
struct NormForward {
  const Schedule& features;  // of n
  int64_t n;
  RowMajor<const T> x;  // [rows][n]
  const float* weight;  // [n]
  const float* bias;    // [n], or null
  float eps;
  float* means;   // [rows], written; null for a root-mean-square norm
  float* scales;  // [rows], written
  T* out;         // [rows][n], contiguous, written
};

// x̂·weight (+ bias), for write_row.
template <bool centred, class T>
struct NormOutput {
  const T* x;  // [n]
  float mean, scale;
  const float* weight;  // [n]
  const float* bias;    // [n], or null
  template <class Place, class Vector>
  ISOBIT_INLINE void operator()(const Place& place, Vector& values) const {
    Vector parameter;
    place.read(x, values);
    if (centred) values = values - mean;
    values = values * scale;
    place.read(weight, parameter);
    values = values * parameter;
    if (!bias) return;
    place.read(bias, parameter);
    values = values + parameter;
  }
};

template <bool centred, bool four, class T>
ISOBIT_INLINE void forward_row(const NormForward<T>& pass, int64_t row) {
  const int64_t n = pass.n;
  const T* x = pass.x.row(row);  // [n]
  const float length = static_cast<float>(n);
  const float mean = centred ? sum_row<four>(pass.features, ElementTerms<T>{x}) / length : 0.0f;
  const float square_sum = sum_row<four>(pass.features, SquareTerms<centred, T>{x, mean});
  const float scale = 1.0f / std::sqrt(square_sum / length + pass.eps);
  write_row<four>(n, NormOutput<centred, T>{x, mean, scale, pass.weight, pass.bias},
                  pass.out + row * n);
  if (centred) pass.means[row] = mean;
  pass.scales[row] = scale;
}

// Rows of n elements, `heads` rows per token. No pointer is owned.
template <class T>
struct NormBackward {
  const Schedule& features;  // of n
  int64_t n, heads;
  RowMajor<const T> grad;  // [tokens * heads][n]
  RowMajor<const T> x;     // [tokens * heads][n]
  const float* weight;     // [n]
  const float* means;      // [tokens * heads]; null for a root-mean-square norm
  const float* scales;     // [tokens * heads]
  T* out;                  // [tokens * heads][n], contiguous, written: dx

  // Floats of one token's terms: dweight [heads][n] and, if there is a mean, dbias [n] after it.
  int64_t width() const { return heads * n * (means ? 2 : 1); }
};

// The second pass of backward_row over a row.
template <bool centred, class T>
struct BackwardRow {
  const NormBackward<T>& pass;
  Normalised<centred, T> normalised;
  const T* grad;  // [n]
  float projection, mean_grad;
  T* out;       // [n]
  float* lane;  // [n], and [n] after it; or null
  int64_t next;

  // Elements [at, at + count), count <= 16.
  ISOBIT_INLINE void operator()(int64_t at, int64_t count) const {
    // The rows of a quarter are not all neighbours, so the hardware does not prefetch the next one.
    __builtin_prefetch(pass.grad.row(next) + at);
    __builtin_prefetch(pass.x.row(next) + at);
    Floats g, factor, values, x_hat;
    load_lanes(grad + at, count, 0.0f, g);
    load_lanes(pass.weight + at, count, 0.0f, factor);
    normalised(at, count, x_hat);
    values = g * factor;
    if (centred) values = values - mean_grad;
    values = (values - x_hat * projection) * normalised.scale;
    store_lanes(values, count, out + at);
    if (!lane) return;
    x_hat = g * x_hat;
    add_to_lane(x_hat, count, lane + at);
    if (centred) add_to_lane(g, count, lane + pass.n + at);
  }
};

// Writes dx of a row, and adds its terms of dweight [n], and of dbias [n] after it, to `lane`, if
// that is not null. `next` is the row to prefetch.
template <bool centred, class T>
ISOBIT_INLINE void backward_row(const NormBackward<T>& pass, int64_t row, int64_t next,
                                float* lane) {
  const int64_t n = pass.n;
  const float length = static_cast<float>(n), scale = pass.scales[row];
  const Normalised<centred, T> normalised{pass.x.row(row), centred ? pass.means[row] : 0.0f, scale};
  const WeightedGrad<T> weighted{pass.grad.row(row), pass.weight};
  float sums[centred ? 2 : 1];
  sum_row_into(pass.features, GradTerms<centred, T>{weighted, normalised}, sums);
  const float projection = sums[0] / length, mean_grad = centred ? sums[centred] / length : 0.0f;
  const BackwardRow<centred, T> lanes{pass,      normalised,         weighted.grad, projection,
                                      mean_grad, pass.out + row * n, lane,          next};
  int64_t at = 0;
  for (; at + lane_count <= n; at += lane_count) lanes(at, lane_count);
  if (at < n) lanes(at, n - at);
}

// [Note: quarters] A leaf of tokens is striped over 16 lanes. A quarter is the tokens of lanes 4q
// to 4q + 3, merged. Four lanes fit in the nearest cache, and one leaf occupies four threads.
//   lanes  [4][width], scratch
//   sum    [width], written
template <bool centred, class T>
ISOBIT_INLINE void backward_quarter(const NormBackward<T>& pass, const Leaf& leaf, int64_t quarter,
                                    float* lanes, float* sum) {
  const int64_t width = pass.width();
  std::fill(lanes, lanes + 4 * width, 0.0f);
  for (int64_t t = 4 * quarter, next; t < leaf.length; t = next) {
    next = t % 4 == 3 ? t + lane_count - 3 : t + 1;
    const int64_t row = (leaf.start + t) * pass.heads;
    const int64_t ahead = ((next < leaf.length ? next : t) - t) * pass.heads;
    for (int64_t h = 0; h < pass.heads; h++)
      backward_row<centred>(pass, row + h, row + h + ahead, lanes + t % 4 * width + h * pass.n);
  }
  // Order: the first two levels of the tree over the 16 lanes.
  for (int64_t i = 0; i < width; i++)
    sum[i] = (lanes[i] + lanes[width + i]) + (lanes[2 * width + i] + lanes[3 * width + i]);
}

}  // namespace isobit
