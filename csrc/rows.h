// Rows of a tensor: the view of a tensor as rows, the maximum of a row, and the terms of its sums.
#pragma once

#include "dtypes.h"
#include "fp_environment.h"
#include "memory.h"
#include "packing.h"
#include "sums.h"

namespace isobit {

constexpr int64_t grain = 8192;  // elements per task of at::parallel_for, at least

// Rows per task of at::parallel_for, at least, where a row has n elements.
inline int64_t row_grain(int64_t n) { return std::max<int64_t>(grain / n, 1); }

// The tensor as [rows, n], n its last axis, with the elements of a row contiguous. Copies if no
// such view exists.
inline Tensor as_rows(const Tensor& t) {
  if (t.dim() == 2 && t.stride(1) == 1) return t;  // without a call of the dispatcher
  const Tensor rows = t.reshape({t.numel() / t.size(-1), t.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

// The data of a tensor that as_rows returned. Not owned.
template <class T>
RowMajor<const T> row_data(const Tensor& rows) {
  return {rows.const_data_ptr<T>(), rows.stride(0)};
}

ISOBIT_INLINE void update_max(Floats& max, const Floats& other) { max = other > max ? other : max; }

// The maximum of x [n]. A maximum is exact, so its order is free. Skips NaN: the row's sum
// propagates it.
template <class T>
ISOBIT_INLINE float max_of_row(const T* x, int64_t n) {
  constexpr int64_t block = 4 * lane_count;
  Floats max[4], values;
  for (Floats& m : max) m = Floats{} - infinity;
  int64_t at = 0;
  for (; at + block <= n; at += block)
    for (int64_t i = 0; i < 4; i++) {
      load(x + at + i * lane_count, values);
      update_max(max[i], values);
    }
  for (; at < n; at += lane_count) {
    load_lanes(x + at, std::min(lane_count, n - at), -infinity, values);
    update_max(max[0], values);
  }
  for (int64_t i = 1; i < 4; i++) update_max(max[0], max[i]);
  Floats& most = max[0];
  update_max(most, __builtin_shufflevector(most, most, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4,
                                           5, 6, 7));
  update_max(most, __builtin_shufflevector(most, most, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9,
                                           10, 11));
  update_max(most, __builtin_shufflevector(most, most, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15,
                                           12, 13));
  return most[0] > most[1] ? most[0] : most[1];
}

// The terms of a row's plain sum (see [Note: terms] in sums.h).
template <class T>
struct ElementTerms {
  const T* x;  // [n]
  ISOBIT_INLINE void four(int64_t at, Floats4& values) const { load(x + at, values); }
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    load_lanes(x + at, count, 0.0f, values);
  }
};

// The terms of a dot product, each rounded to fp32.
template <class T>
struct ProductTerms {
  const T* left;   // [n]
  const T* right;  // [n]
  ISOBIT_INLINE void four(int64_t at, Floats4& values) const {
    Floats4 factor;
    load(left + at, values);
    load(right + at, factor);
    values = values * factor;
  }
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    Floats factor;
    load_lanes(left + at, count, 0.0f, values);
    load_lanes(right + at, count, 0.0f, factor);
    values = values * factor;
  }
};

// Where a formula of write_row reads: 64 elements from `at` on, or `count` <= 16.
struct WholePlace {
  int64_t at;
  template <class T>
  ISOBIT_INLINE void read(const T* row, Floats4& values) const {
    load(row + at, values);
  }
};
struct LanesPlace {
  int64_t at, count;
  template <class T>
  ISOBIT_INLINE void read(const T* row, Floats& values) const {
    load_lanes(row + at, count, 0.0f, values);
  }
};

// Rounds the elements of a row to out [n]. `formula(place, values)` sets `values`, Floats4 or
// Floats, to those of a place; Floats4 only if `four`.
template <bool four, class Formula, class T>
ISOBIT_INLINE void write_row(int64_t n, const Formula& formula, T* out) {
  int64_t at = 0;
  if constexpr (four)
    for (; at + lane_count4 <= n; at += lane_count4) {
      Floats4 values;
      formula(WholePlace{at}, values);
      round_to(values, out + at);
    }
  for (; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values;
    formula(LanesPlace{at, count}, values);
    store_lanes(values, count, out + at);
  }
}

// Rounds a contiguous fp32 tensor to another dtype; returns it unchanged if it has that dtype.
inline Tensor round_tensor(const char* function, const Tensor& t, at::ScalarType dtype) {
  if (t.scalar_type() == dtype) return t;
  Tensor out = empty_tensor(t.sizes(), dtype);
  const float* src = t.const_data_ptr<float>();  // [numel]
  dispatch_dtype(function, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* dst = out.mutable_data_ptr<T>();  // [numel]
    for (int64_t i = 0; i < t.numel(); i++) round_to(src[i], dst + i);
  });
  return out;
}

}  // namespace isobit
