// Copies matrices between the memory formats of tensors and of the tile engine. Adds nothing.
//
// A product sums over one axis of each operand, the summed axis (k), and keeps the other.
// The engine requires the left operand as rows with the summed axis contiguous, and the right one
// as panels of `width` columns:
//   fp32  [length][width]
//   bf16  [length / 2][width][2], pairs along the summed axis, an odd last element paired with zero
#pragma once

#include <c10/util/BFloat16.h>
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "clones.h"
#include "lanes.h"

namespace isobit {

// An operand of a product in memory: element (i, k) is data[i * kept_stride + k * summed_stride],
// where i is the index of the kept axis (a row of the left operand, a column of the right one).
// Not owned.
template <class T>
struct MatrixView {
  const T* data;  // [kept][summed], strides below
  int64_t kept_stride, summed_stride;
  // The part that begins at (i, k).
  MatrixView from(int64_t i, int64_t k) const {
    return {data + i * kept_stride + k * summed_stride, kept_stride, summed_stride};
  }
};

// A matrix whose rows are contiguous: element (i, j) is data[i * stride + j]. Not owned.
template <class T>
struct RowMajor {
  T* data;         // [rows][columns], row stride = stride
  int64_t stride;  // in elements
  T* row(int64_t i) const { return data + i * stride; }
};

inline const uint32_t* as_words(const void* p) { return static_cast<const uint32_t*>(p); }
inline uint32_t* as_words(void* p) { return static_cast<uint32_t*>(p); }

// One stage of a 16 x 16 transpose: exchanges blocks of D lanes between registers D apart.
#define ISOBIT_BUTTERFLY(D, ...)                                             \
  for (int i = 0; i < 16; i++)                                               \
    if (!(i & D)) {                                                          \
      Uint32s low = block[i], high = block[i + D];                           \
      block[i] = __builtin_shufflevector(low, high, __VA_ARGS__);            \
      block[i + D] = __builtin_shufflevector(low, high, ISOBIT_SHIFTED_##D); \
    }
#define ISOBIT_SHIFTED_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define ISOBIT_SHIFTED_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define ISOBIT_SHIFTED_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define ISOBIT_SHIFTED_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

// Reads src[16] without changing bits; see [Note: loading] for the other types.
ISOBIT_INLINE void load(const uint32_t* src, Floats& values) {
  values = *reinterpret_cast<const Floats*>(src);
}
ISOBIT_INLINE void load_one(const uint32_t* src, uint32_t* dst) { *dst = *src; }
template <class T>
ISOBIT_INLINE void load_one(const T* src, uint32_t* dst) {
  const float value = static_cast<float>(*src);
  std::memcpy(dst, &value, sizeof value);
}

// dst[c][r] = src[r][c]: words as they are, other types widened to fp32, which is exact.
template <class T>
ISOBIT_INLINE void transpose(const T* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride,
                             int64_t rows, int64_t cols) {
  int64_t r0 = 0;
  for (; r0 + 16 <= rows; r0 += 16) {
    int64_t c0 = 0;
    for (; c0 + 16 <= cols; c0 += 16) {
      Uint32s block[16];
      for (int i = 0; i < 16; i++)
        load(src + (r0 + i) * src_stride + c0, reinterpret_cast<Floats&>(block[i]));
      ISOBIT_BUTTERFLY(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
      ISOBIT_BUTTERFLY(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
      ISOBIT_BUTTERFLY(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
      ISOBIT_BUTTERFLY(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
      for (int i = 0; i < 16; i++)
        *reinterpret_cast<Uint32s*>(dst + (c0 + i) * dst_stride + r0) = block[i];
    }
    for (; c0 < cols; c0++)
      for (int64_t i = r0; i < r0 + 16; i++)
        load_one(src + i * src_stride + c0, dst + c0 * dst_stride + i);
  }
  for (int64_t c = 0; c < cols; c++)
    for (int64_t i = r0; i < rows; i++)
      load_one(src + i * src_stride + c, dst + c * dst_stride + i);
}

// dst[c][r] = src[r][c], of 32-bit words: fp32 values, or pairs of bf16.
ISOBIT_CLONES inline void transpose_words(
    const uint32_t* src,  // [rows][cols], row stride = src_stride
    int64_t src_stride,
    uint32_t* dst,  // [cols][rows], row stride = dst_stride
    int64_t dst_stride, int64_t rows, int64_t cols) {
  transpose(src, src_stride, dst, dst_stride, rows, cols);
}

// out[i] = the pair (a[i], b[i]): elements 2j and 2j + 1 of the summed axis. All are [n].
ISOBIT_CLONES inline void interleave_pairs(const uint16_t* a, const uint16_t* b,
                                           uint32_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = uint32_t(a[i]) | (uint32_t(b[i]) << 16);
}

// The length of a leaf of `length` elements in packed form; the pointer selects the type only.
inline int64_t padded_length(int64_t length, const float*) { return length; }
inline int64_t padded_length(int64_t length, const c10::BFloat16*) { return (length + 1) / 2 * 2; }

// Packs one leaf of `count` columns into one panel; the columns from `count` on are zero.
inline void pack_columns(MatrixView<float> b,  // [count][length]
                         int64_t length, int64_t count, int64_t width,
                         float* dst) {  // [length][width]
  if (b.kept_stride == 1) {
    for (int64_t k = 0; k < length; k++)
      std::memcpy(dst + k * width, b.data + k * b.summed_stride, count * sizeof(float));
  } else if (b.summed_stride == 1) {
    transpose_words(as_words(b.data), b.kept_stride, as_words(dst), width, count, length);
  } else {
    for (int64_t k = 0; k < length; k++)
      for (int64_t j = 0; j < count; j++)
        dst[k * width + j] = b.data[k * b.summed_stride + j * b.kept_stride];
  }
  if (count < width)
    for (int64_t k = 0; k < length; k++)
      std::memset(dst + k * width + count, 0, (width - count) * sizeof(float));
}

inline void pack_columns(MatrixView<c10::BFloat16> b,  // [count][length]
                         int64_t length, int64_t count, int64_t width,
                         c10::BFloat16* dst) {  // [padded length / 2][width][2]
  static const uint16_t zeros[4096] = {};
  const uint16_t* data = reinterpret_cast<const uint16_t*>(b.data);  // as b.data
  uint32_t* out = as_words(dst);                                     // [padded length / 2][width]
  int64_t pairs = length / 2;
  if (b.kept_stride == 1) {
    for (int64_t p = 0; p < pairs; p++)
      interleave_pairs(data + 2 * p * b.summed_stride, data + (2 * p + 1) * b.summed_stride,
                       out + p * width, count);
    if (length % 2)
      interleave_pairs(data + 2 * pairs * b.summed_stride, zeros, out + pairs * width, count);
  } else {
    if (b.summed_stride == 1 && b.kept_stride % 2 == 0) {
      transpose_words(as_words(data), b.kept_stride / 2, out, width, count, pairs);
    } else {
      for (int64_t p = 0; p < pairs; p++)
        for (int64_t j = 0; j < count; j++) {
          const uint16_t* pair = data + 2 * p * b.summed_stride + j * b.kept_stride;
          out[p * width + j] = uint32_t(pair[0]) | (uint32_t(pair[b.summed_stride]) << 16);
        }
    }
    if (length % 2)
      for (int64_t j = 0; j < count; j++)
        out[pairs * width + j] = data[2 * pairs * b.summed_stride + j * b.kept_stride];
  }
  if (count < width)
    for (int64_t p = 0; p < (length + 1) / 2; p++)
      std::memset(out + p * width + count, 0, (width - count) * sizeof(uint32_t));
}

// Packs one leaf of `count` rows. The scratch memory is for bf16 only.
inline void pack_rows(MatrixView<float> a,  // [count][length]
                      int64_t length, int64_t count,
                      RowMajor<float> dst,  // [count][length]
                      uint32_t*) {
  if (a.summed_stride == 1) {
    for (int64_t i = 0; i < count; i++)
      std::memcpy(dst.row(i), a.data + i * a.kept_stride, length * sizeof(float));
  } else if (a.kept_stride == 1) {
    transpose_words(as_words(a.data), a.summed_stride, as_words(dst.data), dst.stride, length,
                    count);
  } else {
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < length; k++)
        dst.row(i)[k] = a.data[i * a.kept_stride + k * a.summed_stride];
  }
}

inline void pack_rows(MatrixView<c10::BFloat16> a,  // [count][length]
                      int64_t length, int64_t count,
                      RowMajor<c10::BFloat16> dst,  // [count][padded length]
                      uint32_t* pairs_scratch) {    // [padded length / 2][count]
  if (a.summed_stride == 1) {
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(dst.row(i), a.data + i * a.kept_stride, length * 2);
      if (length % 2) dst.row(i)[length] = 0.0f;
    }
    return;
  }
  pack_columns(a, length, count, count, reinterpret_cast<c10::BFloat16*>(pairs_scratch));
  transpose_words(pairs_scratch, count, as_words(dst.data), dst.stride / 2, (length + 1) / 2,
                  count);
}

}  // namespace isobit
