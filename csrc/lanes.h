// Vectors of sixteen lanes: loading elements as fp32, and the one rounding to the output dtype.
//
// Vectors are passed by reference only, because without AVX-512 no register holds one.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cstdint>
#include <limits>

#include "clones.h"

namespace isobit {

// Part of the order of addition: a row sum's leaf is striped over this many lanes (sums.h).
constexpr int64_t lane_count = 16;
constexpr float infinity = std::numeric_limits<float>::infinity();

// Each has sixteen lanes and may lie at any address of its element type.
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Uint32s __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Int32s __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Uint16s __attribute__((vector_size(32), aligned(2), may_alias));

// [Note: loading] Reads src[16], widened to fp32, which is exact.
ISOBIT_INLINE void load(const float* src, Floats& values) {
  values = *reinterpret_cast<const Floats*>(src);
}
ISOBIT_INLINE void load(const c10::BFloat16* src, Floats& values) {
  const Uint16s bits = *reinterpret_cast<const Uint16s*>(src);
  values = reinterpret_cast<Floats>(__builtin_convertvector(bits, Uint32s) << 16);
}
// The same operations as c10's scalar conversion: a shift and an exact product; subnormals by an
// exact subtraction.
ISOBIT_INLINE void load(const c10::Half* src, Floats& values) {
  const Uint32s bits = __builtin_convertvector(*reinterpret_cast<const Uint16s*>(src), Uint32s);
  const Uint32s sign = (bits & 0x8000) << 16;
  const Uint32s twice = (bits & 0x7fff) << 17;
  const Floats normal = reinterpret_cast<Floats>((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const Floats subnormal = reinterpret_cast<Floats>((twice >> 17) | (126u << 23)) - 0.5f;
  const Uint32s magnitude =
      twice < (1u << 27) ? reinterpret_cast<Uint32s>(subnormal) : reinterpret_cast<Uint32s>(normal);
  values = reinterpret_cast<Floats>(magnitude | sign);
}

// Returns v, or the one NaN that results may contain. Which payload survives an addition depends on
// the order of its operands, which a tile may choose freely.
ISOBIT_INLINE float canonical_nan(float v) { return v != v ? __builtin_nanf("") : v; }

// [Note: the one rounding] Sums are fp32; each output element is rounded once, to nearest even.

// Writes *dst.
ISOBIT_INLINE void round_to(float v, float* dst) { *dst = canonical_nan(v); }
ISOBIT_INLINE void round_to(float v, c10::BFloat16* dst) {
  uint32_t u;
  __builtin_memcpy(&u, &v, 4);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  dst->x = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
ISOBIT_INLINE void round_to(float v, c10::Half* dst) {
  dst->x = v != v ? uint16_t(0x7e00) : c10::detail::fp16_ieee_from_fp32_value(v);
}

// Writes dst[16].
ISOBIT_INLINE void round_to(const Floats& v, float* dst) {
  *reinterpret_cast<Floats*>(dst) = v != v ? Floats{} + __builtin_nanf("") : v;
}
ISOBIT_INLINE void round_to(const Floats& v, c10::BFloat16* dst) {
  const Uint32s bits = reinterpret_cast<Uint32s>(v);
  const Uint32s rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *reinterpret_cast<Uint16s*>(dst) =
      __builtin_convertvector(v != v ? Uint32s{} + 0x7fc0u : rounded, Uint16s);
}
// The same operations as c10's scalar conversion: adding a power of two rounds at the last place
// that fp16 keeps.
ISOBIT_INLINE void round_to(const Floats& v, c10::Half* dst) {
  const Uint32s bits = reinterpret_cast<Uint32s>(v), exponent = (bits << 1) & 0xff000000u;
  const Uint32s power =
      ((exponent < 0x71000000u ? Uint32s{} + 0x71000000u : exponent) >> 1) + 0x07800000u;
  const Floats overflowed = reinterpret_cast<Floats>(bits & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
  const Uint32s sum = reinterpret_cast<Uint32s>(reinterpret_cast<Floats>(power) + overflowed);
  const Uint32s rounded = ((bits >> 16) & 0x8000u) | (((sum >> 13) & 0x7c00u) + (sum & 0xfffu));
  *reinterpret_cast<Uint16s*>(dst) =
      __builtin_convertvector(v != v ? Uint32s{} + 0x7e00u : rounded, Uint16s);
}

// Reads src[count], count <= 16; the lanes after them are `fill`.
template <class T>
ISOBIT_INLINE void load_lanes(const T* src, int64_t count, float fill, Floats& values) {
  if (count == lane_count) return load(src, values);
  T padded[lane_count];
  for (int64_t i = 0; i < lane_count; i++) padded[i] = i < count ? src[i] : static_cast<T>(fill);
  load(padded, values);
}

// Rounds the first `count` lanes, count <= 16, to dst[count].
template <class T>
ISOBIT_INLINE void store_lanes(const Floats& values, int64_t count, T* dst) {
  if (count == lane_count) return round_to(values, dst);
  T padded[lane_count];
  round_to(values, padded);
  for (int64_t i = 0; i < count; i++) dst[i] = padded[i];
}

}  // namespace isobit
