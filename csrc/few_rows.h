// Few rows times a weight that is not packed.
//
// The tile engine reads fp32 only, and computes at least 16 columns. With few rows a product is
// bound by reading the weight: here 16 of its rows are read as streams, transposed and widened in
// registers, and each output's chain, ascending and fused as the engine's, runs in a lane.
#pragma once

#include <ATen/Parallel.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "fp_environment.h"
#include "half.h"
#include "linear.h"
#include "sums.h"

namespace isobit {

// fp32 is read as words, so that nothing is converted, and fp16 by the processor's conversion.
inline const uint32_t* as_read(const float* p) { return as_words(p); }
inline const BFloat16* as_read(const BFloat16* p) { return p; }
#ifdef ISOBIT_AVX512
#define ISOBIT_FEW_ROWS ISOBIT_AVX512
inline const HardwareHalf* as_read(const Half* p) {
  return reinterpret_cast<const HardwareHalf*>(p);
}
inline void load_one(const HardwareHalf* src, uint32_t* dst) {
  load_one(reinterpret_cast<const Half*>(src), dst);
}
#else  // compiled, not called
#define ISOBIT_FEW_ROWS
inline const Half* as_read(const Half* p) { return p; }
#endif

// chains[r][i] = fma(x[r][k], block[k][i], chains[r][i]) for k < count, ascending. By intrinsics:
// GCC 12 does not vectorise these loops reliably.
//   x       [R][count], row stride = x_stride
//   block   [count][16]
template <int R>
ISOBIT_FEW_ROWS ISOBIT_INLINE void continue_chains(const float* x, int64_t x_stride, int64_t count,
                                                   const Floats* block, Floats (&chains)[R]) {
#ifdef ISOBIT_AVX512
  for (int64_t k = 0; k < count; k++)
#pragma GCC unroll 8
    for (int64_t r = 0; r < R; r++)
      chains[r] = reinterpret_cast<Floats>(_mm512_fmadd_ps(_mm512_set1_ps(x[r * x_stride + k]),
                                                           reinterpret_cast<__m512>(block[k]),
                                                           reinterpret_cast<__m512>(chains[r])));
#endif
}

#ifdef ISOBIT_AVX512

// Of forms with a mask, which are those without one if it is constant: GCC 12 warns of the others.
constexpr __mmask16 all_words = 0xffff;
constexpr __mmask8 all_pairs = 0xff;

// What is prefetched while 16 rows are read: the same bytes of the next 16, if rows are so short
// that the second cache holds them until then. Measured.
ISOBIT_INLINE int64_t bytes_ahead(int64_t row_bytes) {
  return 16 * row_bytes <= 1 << 18 ? 16 * row_bytes : 256;
}

// The next 64 bytes of 16 rows as words: words[j] has word j of every row, row i in lane i. A row's
// four quarters are read one after the other: rows are often 4 KiB apart, where the first cache
// holds 8 lines, so that a line that is read twice should be read at once.
//   rows  [16][64 bytes], `stride` bytes apart; what is `ahead` bytes behind them is prefetched
ISOBIT_FEW_ROWS ISOBIT_INLINE void read_words(const char* rows, int64_t stride, int64_t ahead,
                                              __m512i (&words)[16]) {
  __m512i quarters[4][4];  // [of the 64 bytes][i]: of the rows i, i + 4, i + 8 and i + 12
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; i++) {
    const char* row = rows + i * stride;
    asm("" : "+r"(row));  // otherwise GCC 12 keeps a pointer for each of 80 addresses, in memory
#pragma GCC unroll 4
    for (int64_t k = 0; k < 4; k++) __builtin_prefetch(row + 4 * k * stride + ahead, 0, 2);
#pragma GCC unroll 4
    for (int64_t q = 0; q < 4; q++) {
      const auto read = [&](int64_t k) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 4 * k * stride) + q);
      };
      __m512i four = _mm512_castsi128_si512(read(0));
      four = _mm512_maskz_inserti32x4(all_words, four, read(1), 1);
      four = _mm512_maskz_inserti32x4(all_words, four, read(2), 2);
      quarters[q][i] = _mm512_maskz_inserti32x4(all_words, four, read(3), 3);
    }
  }
#pragma GCC unroll 4
  for (int64_t q = 0; q < 4; q++) {  // 4 x 4 words in each quarter of a register
    const auto& [a, b, c, d] = quarters[q];
    const __m512i ab = _mm512_maskz_unpacklo_epi32(all_words, a, b),
                  cd = _mm512_maskz_unpacklo_epi32(all_words, c, d);
    const __m512i ab_high = _mm512_maskz_unpackhi_epi32(all_words, a, b),
                  cd_high = _mm512_maskz_unpackhi_epi32(all_words, c, d);
    words[4 * q] = _mm512_maskz_unpacklo_epi64(all_pairs, ab, cd);
    words[4 * q + 1] = _mm512_maskz_unpackhi_epi64(all_pairs, ab, cd);
    words[4 * q + 2] = _mm512_maskz_unpacklo_epi64(all_pairs, ab_high, cd_high);
    words[4 * q + 3] = _mm512_maskz_unpackhi_epi64(all_pairs, ab_high, cd_high);
  }
}

// The elements in a word of each lane, widened to fp32, which is exact.
ISOBIT_FEW_ROWS ISOBIT_INLINE void widen(__m512i word, const uint32_t*, Floats (&elements)[1]) {
  elements[0] = reinterpret_cast<Floats>(word);
}
ISOBIT_FEW_ROWS ISOBIT_INLINE void widen(__m512i word, const BFloat16*, Floats (&elements)[2]) {
  elements[0] = reinterpret_cast<Floats>(_mm512_maskz_slli_epi32(all_words, word, 16));
  elements[1] =
      reinterpret_cast<Floats>(_mm512_and_si512(word, _mm512_set1_epi32(int32_t(0xffff0000))));
}
ISOBIT_FEW_ROWS ISOBIT_INLINE void widen(__m512i word, const HardwareHalf*, Floats (&elements)[2]) {
  const __m256i low = _mm512_maskz_cvtepi32_epi16(all_words, word),
                high = _mm512_maskz_cvtepi32_epi16(all_words,
                                                   _mm512_maskz_srli_epi32(all_words, word, 16));
  elements[0] = reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(all_words, low));
  elements[1] = reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(all_words, high));
}

#endif

// Continues the chains of R x 16 outputs over a multiple of 64 bytes of the weight's 16 rows.
//   x       [R][length], row stride = x_stride
//   weight  [16][length], row stride = weight_stride
template <int R, class T>
ISOBIT_FEW_ROWS ISOBIT_INLINE void continue_whole(const float* x, int64_t x_stride, const T* weight,
                                                  int64_t weight_stride, int64_t length,
                                                  Floats (&chains)[R]) {
#ifdef ISOBIT_AVX512
  constexpr int64_t per_word = 4 / sizeof(T), step = 16 * per_word;
  const int64_t stride = weight_stride * sizeof(T), ahead = bytes_ahead(stride);
  for (int64_t start = 0; start < length; start += step) {
    __m512i words[16];
    read_words(reinterpret_cast<const char*>(weight + start), stride, ahead, words);
#pragma GCC unroll 16
    for (int64_t j = 0; j < 16; j++) {
      Floats elements[per_word];  // [per_word][16]
      widen(words[j], weight, elements);
      continue_chains<R>(x + start + j * per_word, x_stride, per_word, elements, chains);
    }
  }
#endif
}

// A leaf of R x `cols` outputs, cols <= 16: sums [R][16], each one chain over `length`.
//   x       [R][length], row stride = x_stride
//   weight  [cols][length], row stride = weight_stride
template <int R, class T>
ISOBIT_FEW_ROWS void sum_leaf(const float* x, int64_t x_stride, const T* weight,
                              int64_t weight_stride, int64_t cols, int64_t length, float* sums) {
  constexpr int64_t step = 64 / sizeof(T);
  Floats chains[R] = {};
  const int64_t whole = cols == lane_count ? length / step * step : 0;
  continue_whole<R>(x, x_stride, weight, weight_stride, whole, chains);
  Floats block[lane_count] = {};  // [16 of length][16]
  for (int64_t start = whole; start < length; start += lane_count) {
    const int64_t count = std::min(lane_count, length - start);
    transpose(weight + start, weight_stride, as_words(static_cast<void*>(block)), lane_count, cols,
              count);
    continue_chains<R>(x + start, x_stride, count, block, chains);
  }
  for (int64_t r = 0; r < R; r++) *reinterpret_cast<Floats*>(sums + r * lane_count) = chains[r];
}

// T is the weight's element type, Out the result's, R the number of rows.
template <int R, class T, class Out>
class FewRows {
 public:
  // x [R][K], weight [N][K], bias [N] or null, out [R][N]. The schedule is of all K. Nothing is
  // owned.
  FewRows(const Schedule& schedule, RowMajor<const float> x, RowMajor<const T> weight,
          const float* bias, RowMajor<Out> out)
      : schedule_(schedule), x_(x), weight_(weight), bias_(bias), out_(out) {}

  void run(int64_t cols) const {
    const int64_t tiles = (cols + lane_count - 1) / lane_count;
    at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      for (int64_t t = begin; t < end; t++)
        run_tile(t * lane_count, std::min(lane_count, cols - t * lane_count));
    });
  }

 private:
  void run_tile(int64_t col, int64_t cols) const {
    constexpr int64_t size = R * lane_count;
    float segments[feature_cap][size];  // [segments][R][16]
    float next[size];                   // [R][16]: a leaf
    int64_t leaf = 0, count = schedule_.segment_count();
    for (int64_t s = 0; s < count; s++)
      for (bool first = true; leaf < schedule_.segment_end[s]; leaf++, first = false) {
        const auto [start, length, fold] = schedule_.leaves[leaf];
        sum_leaf<R>(x_.data + start, x_.stride, as_read(weight_.row(col) + start), weight_.stride,
                    cols, length, first ? segments[s] : next);
        if (!first) merge2(segments[s], next, size);
      }
    for (; count > 1; count /= 2)  // Order: the balanced tree over the segments
      for (int64_t s = 0; s < count / 2; s++) {
        if (s > 0) std::copy_n(segments[2 * s], size, segments[s]);
        merge2(segments[s], segments[2 * s + 1], size);
      }
    round_tile(segments[0], nullptr, nullptr, nullptr, lane_count, bias_ ? bias_ + col : nullptr, R,
               cols, out_.data + col, out_.stride);
  }

  const Schedule& schedule_;
  RowMajor<const float> x_;
  RowMajor<const T> weight_;
  const float* bias_;
  RowMajor<Out> out_;
};

}  // namespace isobit
