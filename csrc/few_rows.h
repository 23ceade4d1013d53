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
ISOBIT_FEW_ROWS inline void continue_chains(const float* x, int64_t x_stride, int64_t count,
                                            const Floats* block, Floats* chains) {
#ifdef ISOBIT_AVX512
  for (int64_t k = 0; k < count; k++)
    for (int64_t r = 0; r < R; r++)
      chains[r] = reinterpret_cast<Floats>(_mm512_fmadd_ps(_mm512_set1_ps(x[r * x_stride + k]),
                                                           reinterpret_cast<__m512>(block[k]),
                                                           reinterpret_cast<__m512>(chains[r])));
#endif
}

// A leaf of R x `cols` outputs, cols <= 16: sums [R][16], each one chain over `length`.
//   x       [R][length], row stride = x_stride
//   weight  [cols][length], row stride = weight_stride
template <int R, class T>
ISOBIT_FEW_ROWS void sum_leaf(const float* x, int64_t x_stride, const T* weight,
                              int64_t weight_stride, int64_t cols, int64_t length, float* sums) {
  constexpr int64_t ahead = 256 / sizeof(T);  // elements; measured
  Floats chains[R] = {};
  Floats block[lane_count] = {};  // [16 of length][16]
  uint32_t* words = as_words(static_cast<void*>(block));
  const int64_t whole = cols == lane_count ? length / lane_count * lane_count : 0;
  for (int64_t start = 0; start < whole; start += lane_count) {
    for (int64_t i = 0; i < lane_count; i++)
      __builtin_prefetch(weight + i * weight_stride + start + ahead, 0, 3);
    transpose(weight + start, weight_stride, words, lane_count, lane_count, lane_count);
    continue_chains<R>(x + start, x_stride, lane_count, block, chains);
  }
  for (int64_t start = whole; start < length; start += lane_count) {
    const int64_t count = std::min(lane_count, length - start);
    transpose(weight + start, weight_stride, words, lane_count, cols, count);
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
