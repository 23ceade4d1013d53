// Moves values between the layouts of tensors and of the tile engine, and rounds once at the end.
// Adds nothing.
//
// The engine wants A as rows with the summed axis contiguous, and B as panels of `panel_width`
// columns: fp32 [k][column]; bf16 [k / 2][column][2], pairs along the summed axis, an odd tail
// padded with zero.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "clones.h"

namespace isobit {

#define ISOBIT_INLINE inline __attribute__((always_inline))

// Sixteen lanes, unaligned; passed by reference only, since without AVX-512 no register holds them.
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Lanes __attribute__((vector_size(64), aligned(4), may_alias));

// A matrix in memory, indexed (row, k) for A and (k, column) for B by its two strides.
template <class T>
struct View {
  const T* data;
  int64_t outer, inner;  // stride of the kept axis, stride of the summed axis
  View shift(int64_t kept, int64_t summed) const {
    return {data + kept * outer + summed * inner, outer, inner};
  }
};

// ---- 32-bit transposes: an fp32 value, or a bf16 pair
// --------------------------------------------------

#define ISOBIT_BUTTERFLY(D, ...)                                         \
  for (int i = 0; i < 16; i++)                                           \
    if (!(i & D)) {                                                      \
      Lanes low = r[i], high = r[i + D];                                 \
      r[i] = __builtin_shufflevector(low, high, __VA_ARGS__);            \
      r[i + D] = __builtin_shufflevector(low, high, ISOBIT_SHIFTED_##D); \
    }
#define ISOBIT_SHIFTED_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define ISOBIT_SHIFTED_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define ISOBIT_SHIFTED_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define ISOBIT_SHIFTED_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

// dst[c][r] = src[r][c]
ISOBIT_CLONES inline void transpose32(const uint32_t* src, int64_t src_stride, uint32_t* dst,
                                      int64_t dst_stride, int64_t rows, int64_t cols) {
  int64_t r0 = 0;
  for (; r0 + 16 <= rows; r0 += 16) {
    int64_t c0 = 0;
    for (; c0 + 16 <= cols; c0 += 16) {
      Lanes r[16];
      for (int i = 0; i < 16; i++)
        r[i] = *reinterpret_cast<const Lanes*>(src + (r0 + i) * src_stride + c0);
      ISOBIT_BUTTERFLY(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
      ISOBIT_BUTTERFLY(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
      ISOBIT_BUTTERFLY(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
      ISOBIT_BUTTERFLY(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
      for (int i = 0; i < 16; i++)
        *reinterpret_cast<Lanes*>(dst + (c0 + i) * dst_stride + r0) = r[i];
    }
    for (; c0 < cols; c0++)
      for (int64_t i = r0; i < r0 + 16; i++) dst[c0 * dst_stride + i] = src[i * src_stride + c0];
  }
  for (int64_t c = 0; c < cols; c++)
    for (int64_t i = r0; i < rows; i++) dst[c * dst_stride + i] = src[i * src_stride + c];
}

// out[i] = the pair (a[i], b[i]); bf16 rows 2j and 2j + 1 of the summed axis.
ISOBIT_CLONES inline void interleave16(const uint16_t* a, const uint16_t* b,
                                       uint32_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = uint32_t(a[i]) | (uint32_t(b[i]) << 16);
}

// ---- packing: one leaf of `length` by `count` rows or columns
// ------------------------------------------

inline int64_t padded(int64_t length, const float*) { return length; }
inline int64_t padded(int64_t length, const c10::BFloat16*) { return (length + 1) / 2 * 2; }

inline const uint32_t* words(const void* p) { return static_cast<const uint32_t*>(p); }
inline uint32_t* words(void* p) { return static_cast<uint32_t*>(p); }

// dst[length][width], columns from `count` on zero.
inline void pack_columns(View<float> b, int64_t length, int64_t count, int64_t width, float* dst) {
  if (b.outer == 1) {
    for (int64_t k = 0; k < length; k++)
      std::memcpy(dst + k * width, b.data + k * b.inner, count * sizeof(float));
  } else if (b.inner == 1) {
    transpose32(words(b.data), b.outer, words(dst), width, count, length);
  } else {
    for (int64_t k = 0; k < length; k++)
      for (int64_t j = 0; j < count; j++) dst[k * width + j] = b.data[k * b.inner + j * b.outer];
  }
  if (count < width)
    for (int64_t k = 0; k < length; k++)
      std::memset(dst + k * width + count, 0, (width - count) * sizeof(float));
}

inline void pack_columns(View<c10::BFloat16> b, int64_t length, int64_t count, int64_t width,
                         c10::BFloat16* dst) {
  static const uint16_t zeros[4096] = {};
  const uint16_t* data = reinterpret_cast<const uint16_t*>(b.data);
  uint32_t* out = words(dst);
  int64_t pairs = length / 2;
  if (b.outer == 1) {
    for (int64_t p = 0; p < pairs; p++)
      interleave16(data + 2 * p * b.inner, data + (2 * p + 1) * b.inner, out + p * width, count);
    if (length % 2) interleave16(data + 2 * pairs * b.inner, zeros, out + pairs * width, count);
  } else {
    if (b.inner == 1 && b.outer % 2 == 0) {
      transpose32(words(data), b.outer / 2, out, width, count, pairs);
    } else {
      for (int64_t p = 0; p < pairs; p++)
        for (int64_t j = 0; j < count; j++) {
          const uint16_t* at = data + 2 * p * b.inner + j * b.outer;
          out[p * width + j] = uint32_t(at[0]) | (uint32_t(at[b.inner]) << 16);
        }
    }
    if (length % 2)
      for (int64_t j = 0; j < count; j++)
        out[pairs * width + j] = data[2 * pairs * b.inner + j * b.outer];
  }
  if (count < width)
    for (int64_t p = 0; p < (length + 1) / 2; p++)
      std::memset(out + p * width + count, 0, (width - count) * sizeof(uint32_t));
}

// dst[count][stride], each row `length` long.
inline void pack_rows(View<float> a, int64_t length, int64_t count, float* dst, int64_t stride,
                      uint32_t*) {
  if (a.inner == 1) {
    for (int64_t i = 0; i < count; i++)
      std::memcpy(dst + i * stride, a.data + i * a.outer, length * sizeof(float));
  } else if (a.outer == 1) {
    transpose32(words(a.data), a.inner, words(dst), stride, length, count);
  } else {
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < length; k++) dst[i * stride + k] = a.data[i * a.outer + k * a.inner];
  }
}

// `pairs_scratch` holds padded(length) / 2 * count words.
inline void pack_rows(View<c10::BFloat16> a, int64_t length, int64_t count, c10::BFloat16* dst,
                      int64_t stride, uint32_t* pairs_scratch) {
  if (a.inner == 1) {
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(dst + i * stride, a.data + i * a.outer, length * 2);
      if (length % 2) dst[i * stride + length] = 0.0f;
    }
    return;
  }
  pack_columns(a, length, count, count, reinterpret_cast<c10::BFloat16*>(pairs_scratch));
  transpose32(pairs_scratch, count, words(dst), stride / 2, (length + 1) / 2, count);
}

// ---- widening: sixteen elements to fp32
// ----------------------------------------------------------------

typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

ISOBIT_INLINE void widen(const float* from, Floats& to) {
  to = *reinterpret_cast<const Floats*>(from);
}
ISOBIT_INLINE void widen(const c10::BFloat16* from, Floats& to) {
  to = reinterpret_cast<Floats>(
      __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Lanes) << 16);
}
// As c10's scalar conversion: a shift and an exact product; subnormals by an exact subtraction.
ISOBIT_INLINE void widen(const c10::Half* from, Floats& to) {
  const Lanes bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Lanes),
              sign = (bits & 0x8000) << 16;
  const Lanes twice = (bits & 0x7fff) << 17;
  const Floats normal = reinterpret_cast<Floats>((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
  const Floats subnormal = reinterpret_cast<Floats>((twice >> 17) | (126u << 23)) - 0.5f;
  const Lanes value =
      twice < (1u << 27) ? reinterpret_cast<Lanes>(subnormal) : reinterpret_cast<Lanes>(normal);
  to = reinterpret_cast<Floats>(value | sign);
}

// ---- the one rounding
// ----------------------------------------------------------------------------------

// Every NaN leaves as the same NaN: which payload survives an addition depends on operand order,
// which tiles are free to choose.
ISOBIT_INLINE float one_nan(float v) { return v != v ? __builtin_nanf("") : v; }

ISOBIT_INLINE void round_to(float v, float* out) { *out = one_nan(v); }
ISOBIT_INLINE void round_to(float v, c10::BFloat16* out) {
  uint32_t u;
  __builtin_memcpy(&u, &v, 4);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  out->x = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
ISOBIT_INLINE void round_to(float v, c10::Half* out) {
  out->x = v != v ? uint16_t(0x7e00) : c10::detail::fp16_ieee_from_fp32_value(v);
}

// The same, sixteen at once.
ISOBIT_INLINE void round_to(const Floats& v, float* out) {
  *reinterpret_cast<Floats*>(out) = v != v ? Floats{} + __builtin_nanf("") : v;
}
ISOBIT_INLINE void round_to(const Floats& v, c10::BFloat16* out) {
  const Lanes bits = reinterpret_cast<Lanes>(v),
              rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  *reinterpret_cast<Halves*>(out) =
      __builtin_convertvector(v != v ? Lanes{} + 0x7fc0u : rounded, Halves);
}
// As c10's scalar conversion: a sum with a power of two rounds at the last place that fp16 keeps.
ISOBIT_INLINE void round_to(const Floats& v, c10::Half* out) {
  const Lanes bits = reinterpret_cast<Lanes>(v), size = (bits << 1) & 0xff000000u;
  const Lanes power = ((size < 0x71000000u ? Lanes{} + 0x71000000u : size) >> 1) + 0x07800000u;
  const Floats overflowed = reinterpret_cast<Floats>(bits & 0x7fffffffu) * 0x1p+112f * 0x1p-110f;
  const Lanes sum = reinterpret_cast<Lanes>(reinterpret_cast<Floats>(power) + overflowed);
  const Lanes rounded = ((bits >> 16) & 0x8000u) | (((sum >> 13) & 0x7c00u) + (sum & 0xfffu));
  *reinterpret_cast<Halves*>(out) =
      __builtin_convertvector(v != v ? Lanes{} + 0x7e00u : rounded, Halves);
}

}  // namespace isobit
