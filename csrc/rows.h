// What row and element kernels share: sixteen elements at a time with any tail, rows of any tensor,
// a call per type.
#pragma once

#include <limits>

#include "arithmetic.h"
#include "memory.h"
#include "order.h"

namespace isobit {

using at::Tensor;
using c10::BFloat16;
using c10::Half;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t grain = 8192;  // elements that are worth a thread

// `count` elements, then `rest`.
template <class T>
ISOBIT_INLINE void widen_some(const T* from, int64_t count, float rest, Floats& to) {
  if (count == lane_count) return widen(from, to);
  T some[lane_count];
  for (int64_t i = 0; i < lane_count; i++) some[i] = i < count ? from[i] : static_cast<T>(rest);
  widen(some, to);
}

// `count` elements, rounded.
template <class T>
ISOBIT_INLINE void round_some(const Floats& values, int64_t count, T* out) {
  if (count == lane_count) return round_to(values, out);
  T some[lane_count];
  round_to(values, some);
  for (int64_t i = 0; i < count; i++) out[i] = some[i];
}

ISOBIT_INLINE void take_larger(Floats& most, const Floats& other) {
  most = other > most ? other : most;
}

// Exact, so free in its order. A NaN is passed over: the row's sum meets it.
template <class T>
ISOBIT_INLINE float max_of_row(const T* x, int64_t n) {
  constexpr int64_t block = 4 * lane_count;
  Floats most[4], values;
  for (Floats& m : most) m = Floats{} - infinity;
  int64_t at = 0;
  for (; at + block <= n; at += block)
    for (int64_t i = 0; i < 4; i++) {
      widen(x + at + i * lane_count, values);
      take_larger(most[i], values);
    }
  for (; at < n; at += lane_count) {
    widen_some(x + at, std::min(lane_count, n - at), -infinity, values);
    take_larger(most[0], values);
  }
  for (int64_t i = 1; i < 4; i++) take_larger(most[0], most[i]);
  float found = -infinity;
  for (int64_t i = 0; i < lane_count; i++) found = most[0][i] > found ? most[0][i] : found;
  return found;
}

// The terms of a row's plain sum.
template <class T>
struct Elements {
  const T* x;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    widen_some(x + at, count, 0.0f, values);
  }
};

// The terms of a row's sum of products, each rounded to fp32.
template <class T>
struct ProductTerms {
  const T *left, *right;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    Floats factor;
    widen_some(left + at, count, 0.0f, values);
    widen_some(right + at, count, 0.0f, factor);
    values = values * factor;
  }
};

// As rows whose elements are neighbours in memory; the rows themselves may lie anywhere.
inline Tensor rows_of(const Tensor& t) {
  const Tensor rows = t.reshape({t.numel() / t.size(-1), t.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

inline Schedule schedule_of(int64_t n) {
  return feature_schedule(n, 0, count_segments(n, feature_unit, feature_cap));
}

// Calls `work` with a null pointer of the tensor's element type.
template <class Work>
void by_type(const Tensor& t, const Work& work) {
  if (t.scalar_type() == at::kFloat)
    work(static_cast<float*>(nullptr));
  else if (t.scalar_type() == at::kBFloat16)
    work(static_cast<BFloat16*>(nullptr));
  else if (t.scalar_type() == at::kHalf)
    work(static_cast<Half*>(nullptr));
  else
    TORCH_CHECK(
        false, "isobit: expected fp32, bf16 or fp16, received ", t.scalar_type(),
        "; remedy: call the function of the package, which has a portable executor for fp64");
}

// An fp32 result in the dtype it was asked for, rounded once.
inline Tensor round_all(const Tensor& t, at::ScalarType type) {
  if (t.scalar_type() == type) return t;
  Tensor out = empty_tensor(t.sizes(), type);
  const float* from = t.const_data_ptr<float>();
  by_type(out, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    T* to = out.mutable_data_ptr<T>();
    for (int64_t i = 0; i < t.numel(); i++) round_to(from[i], to + i);
  });
  return out;
}

}  // namespace isobit
