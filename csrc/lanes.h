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

// [Note: four vectors] The steps of one exponential depend on each other, so a core waits for each
// result. Floats4 is four vectors whose operations are written side by side: the core works on one
// while it waits for another. A function of elements is a template over Floats and Floats4; each
// lane has the same operations in both.
struct Floats4 {
  Floats a, b, c, d;
};
constexpr int64_t lane_count4 = 4 * lane_count;

#define ISOBIT_OPERATOR(op)                                               \
  ISOBIT_INLINE Floats4 operator op(const Floats4& x, const Floats4& y) { \
    return {x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d};              \
  }                                                                       \
  ISOBIT_INLINE Floats4 operator op(const Floats4& x, float y) {          \
    return {x.a op y, x.b op y, x.c op y, x.d op y};                      \
  }                                                                       \
  ISOBIT_INLINE Floats4 operator op(float x, const Floats4& y) {          \
    return {x op y.a, x op y.b, x op y.c, x op y.d};                      \
  }
ISOBIT_OPERATOR(+)
ISOBIT_OPERATOR(-)
ISOBIT_OPERATOR(*)
ISOBIT_OPERATOR(/)
#undef ISOBIT_OPERATOR

ISOBIT_INLINE void negate(const Floats& x, Floats& out) { out = -x; }
ISOBIT_INLINE void absolute(const Floats& x, Floats& out) {
  out = reinterpret_cast<Floats>(reinterpret_cast<Uint32s>(x) & 0x7fffffffu);
}
// Shifts the bits of x into the exponent.
ISOBIT_INLINE void shift_to_exponent(const Floats& x, Floats& out) {
  out = reinterpret_cast<Floats>(reinterpret_cast<Uint32s>(x) << 23);
}
#define ISOBIT_OF_FOUR(function)                                \
  ISOBIT_INLINE void function(const Floats4& x, Floats4& out) { \
    function(x.a, out.a);                                       \
    function(x.b, out.b);                                       \
    function(x.c, out.c);                                       \
    function(x.d, out.d);                                       \
  }
ISOBIT_OF_FOUR(negate)
ISOBIT_OF_FOUR(absolute)
ISOBIT_OF_FOUR(shift_to_exponent)
#undef ISOBIT_OF_FOUR

// x = x − n·c, where the product is exact: fused or not, the bits are the same.
ISOBIT_INLINE void subtract_exact_product(const Floats& n, float c, Floats& x) { x = x - n * c; }

#ifdef ISOBIT_AVX512
ISOBIT_INLINE void subtract_exact_product(const Floats4& n, float c, Floats4& x) {
  const Floats factor = Floats{} + c;
  asm("vfnmadd231ps %1, %2, %0" : "+v"(x.a) : "v"(n.a), "v"(factor));
  asm("vfnmadd231ps %1, %2, %0" : "+v"(x.b) : "v"(n.b), "v"(factor));
  asm("vfnmadd231ps %1, %2, %0" : "+v"(x.c) : "v"(n.c), "v"(factor));
  asm("vfnmadd231ps %1, %2, %0" : "+v"(x.d) : "v"(n.d), "v"(factor));
}

// Whether |x| < bound in all lanes; a NaN is not.
ISOBIT_INLINE bool all_within(const Floats4& x, float bound) {
  Floats4 magnitude;
  absolute(x, magnitude);
  // Magnitudes compare as integers do.
  const Uint32s a = reinterpret_cast<Uint32s>(magnitude.a),
                b = reinterpret_cast<Uint32s>(magnitude.b),
                c = reinterpret_cast<Uint32s>(magnitude.c),
                d = reinterpret_cast<Uint32s>(magnitude.d);
  const Uint32s most_ab = a > b ? a : b, most_cd = c > d ? c : d;
  const Uint32s most = most_ab > most_cd ? most_ab : most_cd;
  const Uint32s limit = reinterpret_cast<Uint32s>(Floats{} + bound);
  bool within;
  asm("vpcmpud $5, %2, %1, %%k1\n\tkortestw %%k1, %%k1"  // $5: at least the limit
      : "=@ccz"(within)
      : "v"(most), "v"(limit)
      : "k1");
  return within;
}
#endif

// Sets out to `value` where x < bound, or x > bound. A NaN is neither.
ISOBIT_INLINE void set_where_less(const Floats& x, float bound, float value, Floats& out) {
  out = x < bound ? Floats{} + value : out;
}
ISOBIT_INLINE void set_where_greater(const Floats& x, float bound, float value, Floats& out) {
  out = x > bound ? Floats{} + value : out;
}
// Sets out to `value` where x >= 0.
ISOBIT_INLINE void set_where_positive(const Floats& x, const Floats& value, Floats& out) {
  out = x >= 0.0f ? value : out;
}
ISOBIT_INLINE void set_where_less(const Floats4& x, float bound, float value, Floats4& out) {
  set_where_less(x.a, bound, value, out.a);
  set_where_less(x.b, bound, value, out.b);
  set_where_less(x.c, bound, value, out.c);
  set_where_less(x.d, bound, value, out.d);
}
ISOBIT_INLINE void set_where_greater(const Floats4& x, float bound, float value, Floats4& out) {
  set_where_greater(x.a, bound, value, out.a);
  set_where_greater(x.b, bound, value, out.b);
  set_where_greater(x.c, bound, value, out.c);
  set_where_greater(x.d, bound, value, out.d);
}
ISOBIT_INLINE void set_where_positive(const Floats4& x, const Floats4& value, Floats4& out) {
  set_where_positive(x.a, value.a, out.a);
  set_where_positive(x.b, value.b, out.b);
  set_where_positive(x.c, value.c, out.c);
  set_where_positive(x.d, value.d, out.d);
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

// Writes dst[16]. With `numbers` no lane is NaN.
template <bool numbers = false>
ISOBIT_INLINE void round_to(const Floats& v, float* dst) {
  if constexpr (numbers)
    *reinterpret_cast<Floats*>(dst) = v;
  else
    *reinterpret_cast<Floats*>(dst) = v != v ? Floats{} + __builtin_nanf("") : v;
}
template <bool numbers = false>
ISOBIT_INLINE void round_to(const Floats& v, c10::BFloat16* dst) {
  const Uint32s bits = reinterpret_cast<Uint32s>(v);
  Uint32s rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  if constexpr (!numbers) rounded = v != v ? Uint32s{} + 0x7fc0u : rounded;
  *reinterpret_cast<Uint16s*>(dst) = __builtin_convertvector(rounded, Uint16s);
}
// The same operations as c10's scalar conversion: adding a power of two rounds at the last place
// that fp16 keeps.
template <bool numbers = false>
ISOBIT_INLINE void round_to(const Floats& v, c10::Half* dst) {
  const Uint32s bits = reinterpret_cast<Uint32s>(v), exponent = (bits << 1) & 0xff000000u;
  const Uint32s power =
      ((exponent < 0x71000000u ? Uint32s{} + 0x71000000u : exponent) >> 1) + 0x07800000u;
  const Floats overflowed = reinterpret_cast<Floats>(bits & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
  const Uint32s sum = reinterpret_cast<Uint32s>(reinterpret_cast<Floats>(power) + overflowed);
  Uint32s rounded = ((bits >> 16) & 0x8000u) | (((sum >> 13) & 0x7c00u) + (sum & 0xfffu));
  if constexpr (!numbers) rounded = v != v ? Uint32s{} + 0x7e00u : rounded;
  *reinterpret_cast<Uint16s*>(dst) = __builtin_convertvector(rounded, Uint16s);
}

// Reads src[64], and rounds to dst[64].
template <class T>
ISOBIT_INLINE void load(const T* src, Floats4& values) {
  load(src, values.a);
  load(src + lane_count, values.b);
  load(src + 2 * lane_count, values.c);
  load(src + 3 * lane_count, values.d);
}
template <class T>
ISOBIT_INLINE void round_to(const Floats4& values, T* dst) {
  round_to(values.a, dst);
  round_to(values.b, dst + lane_count);
  round_to(values.c, dst + 2 * lane_count);
  round_to(values.d, dst + 3 * lane_count);
}
// The same where no lane is NaN.
template <class T>
ISOBIT_INLINE void round_numbers_to(const Floats4& values, T* dst) {
  round_to<true>(values.a, dst);
  round_to<true>(values.b, dst + lane_count);
  round_to<true>(values.c, dst + 2 * lane_count);
  round_to<true>(values.d, dst + 3 * lane_count);
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
