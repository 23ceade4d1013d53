// The elementwise steps of attention's online softmax: for one block of keys, and between chunks.
#pragma once

#include "attention.h"
#include "elementary.h"
#include "logarithm.h"

namespace isobit {

// The state of the online softmax: weights are exp(score - max).
struct RunningSoftmax {
  float* max;     // [rows]: the largest score so far
  float* sum;     // [rows]: of the weights so far
  float* output;  // [rows][depth]: of the weights times values so far

  // Makes the state of `rows` rows that of no keys.
  void clear(int64_t rows, int64_t depth) const {
    std::fill(max, max + rows, -infinity);
    std::fill(sum, sum + rows, 0.0f);
    std::fill(output, output + rows * depth, 0.0f);
  }
};

// Scales and caps scores [n] in place; n is a multiple of 16.
ISOBIT_CLONES inline void cap_scores(float* scores, int64_t n, const Scoring scoring) {
  for (int64_t i = 0; i < n; i += lane_count) {
    Floats& score = *reinterpret_cast<Floats*>(scores + i);
    Floats bent;
    tanh(score * scoring.scale / scoring.softcap, bent);
    score = bent * scoring.softcap;
  }
}

// Scales and masks scores in place, and writes the new running maximum of each row.
//   scores      [rows][attention_block]
//   begin, end  [rows]: the keys of this block that a row sees
//   max         [rows]: the running maximum before this block
//   new_max     [rows]
ISOBIT_CLONES inline void mask_scores(float* scores, int64_t rows, float scale,
                                      const int64_t* begin, const int64_t* end, const float* max,
                                      float* new_max) {
  const Uint32s index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t r = 0; r < rows; r++) {
    Floats lane_max = Floats{} - infinity;
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      Floats& score = *reinterpret_cast<Floats*>(scores + r * attention_block + i);
      const Uint32s key = index + static_cast<uint32_t>(i);
      const Floats scaled = score * scale;
      const Uint32s seen =
          (key >= static_cast<uint32_t>(begin[r])) & (key < static_cast<uint32_t>(end[r]));
      score = seen ? scaled : Floats{} - infinity;
      lane_max = score > lane_max ? score : lane_max;
    }
    float row_max = max[r];
    for (int64_t i = 0; i < lane_count; i++)
      row_max = lane_max[i] > row_max ? lane_max[i] : row_max;
    new_max[r] = row_max;
  }
}

// One block's scores, and the running sums of its rows.
template <class T>
struct ScoreBlock {
  const float* scores;   // [rows][attention_block], masked
  const float* new_max;  // [rows]
  float* max;            // [rows], updated
  float* sum;            // [rows], updated
  float* factor;         // [rows], written: what the sums so far are multiplied by
  T* weights;            // [rows][attention_block], written: exp(score - new max)
};

template <class T>
ISOBIT_INLINE void weigh_rows(const ScoreBlock<T> block, int64_t rows) {
  const auto [scores, new_max, max, sum, factor, weights] = block;
  for (int64_t r = 0; r < rows; r += lane_count) {
    const int64_t count = std::min(lane_count, rows - r);
    Floats before, after;
    load_lanes(max + r, count, 0.0f, before);
    load_lanes(new_max + r, count, 0.0f, after);
    before = before - (after == -infinity ? Floats{} : after);
    exp_nonpositive(before);
    store_lanes(before, count, factor + r);
  }
  for (int64_t r = 0; r < rows; r++) {
    const float reference = new_max[r] == -infinity ? 0.0f : new_max[r];
    // Order: a block is one leaf of 64 keys, striped over the lanes; blocks are folded left.
    Floats lanes{};
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      Floats term = *reinterpret_cast<const Floats*>(scores + r * attention_block + i) - reference;
      exp_nonpositive(term);
      lanes += term;
      round_to(term, weights + r * attention_block + i);
    }
    sum[r] = sum[r] * factor[r] + merge_lanes(lanes);
    max[r] = new_max[r];
  }
}

// output [rows][depth] times factor [rows].
ISOBIT_CLONES inline void rescale(float* output, const float* factor, int64_t rows, int64_t depth) {
  for (int64_t r = 0; r < rows; r++)
    if (factor[r] != 1.0f)
      for (int64_t d = 0; d < depth; d++) output[r * depth + d] = output[r * depth + d] * factor[r];
}

// Merges the state of the next chunk of keys into that of the chunks before it. Both are rescaled
// to the larger maximum, then added.
//
// Order: chunks are folded left, with the chunks before as the left operand; the two products and
// the sum are rounded separately. A chunk of which a row sees no key has the state (-inf, 0, 0):
// the factors are then 1 and 0, so the merge changes no bit of the other state but the sign of a
// zero, which divide_row removes. An executor may therefore skip such a chunk or compute it.
ISOBIT_CLONES inline void merge_chunk(const RunningSoftmax total, const RunningSoftmax chunk,
                                      int64_t rows, int64_t depth) {
  for (int64_t r = 0; r < rows; r += lane_count) {
    const int64_t count = std::min(lane_count, rows - r);
    Floats before, next, factors[2];
    load_lanes(total.max + r, count, 0.0f, before);
    load_lanes(chunk.max + r, count, 0.0f, next);
    const Floats max = next > before ? next : before;
    const Floats reference = max == -infinity ? Floats{} : max;
    factors[0] = before - reference;
    factors[1] = next - reference;
    exp_nonpositive(factors[0]);
    exp_nonpositive(factors[1]);
    store_lanes(max, count, total.max + r);
    for (int64_t i = 0; i < count; i++) {
      const float left = factors[0][i], right = factors[1][i];
      float* sums = total.output + (r + i) * depth;         // [depth]
      const float* added = chunk.output + (r + i) * depth;  // [depth]
      total.sum[r + i] = total.sum[r + i] * left + chunk.sum[r + i] * right;
      for (int64_t d = 0; d < depth; d++) sums[d] = sums[d] * left + added[d] * right;
    }
  }
}

// out = output / sum. `output` and `out` are [depth]. Adding 0 makes every zero +0: a -0 may come
// or go with blocks that are not seen.
template <class T>
ISOBIT_INLINE void divide_row(const float* output, float sum, int64_t depth, T* out) {
  for (int64_t d = 0; d < depth; d += lane_count) {
    const Floats value = (*reinterpret_cast<const Floats*>(output + d) + 0.0f) / sum;
    round_to(sum == 0.0f ? Floats{} : value, out + d);
  }
}

#define ISOBIT_ATTENTION(T)                                                                 \
  ISOBIT_CLONES inline void weigh(const ScoreBlock<T> block, int64_t rows) {                \
    weigh_rows(block, rows);                                                                \
  }                                                                                         \
  ISOBIT_CLONES inline void divide(const float* output, float sum, int64_t depth, T* out) { \
    divide_row(output, sum, depth, out);                                                    \
  }
ISOBIT_ATTENTION(float)
ISOBIT_ATTENTION(BFloat16)

// out = max + log(sum), +inf for a row that saw no key. All are [rows].
ISOBIT_CLONES inline void log_sum_exp(const float* max, const float* sum, int64_t rows,
                                      float* out) {
  for (int64_t r = 0; r < rows; r += lane_count) {
    const int64_t count = std::min(lane_count, rows - r);
    Floats log_sum, row_max;
    load_lanes(sum + r, count, 1.0f, log_sum);
    load_lanes(max + r, count, 0.0f, row_max);
    const Floats row_sum = log_sum;
    log_positive(log_sum);
    store_lanes(row_sum == 0.0f ? Floats{} + infinity : row_max + log_sum, count, out + r);
  }
}

// Whether no element of v [n] is infinite or NaN.
inline bool is_finite(const float* v, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) largest = std::max(largest, as_words(v)[i] & 0x7fffffffu);
  return largest < 0x7f800000u;
}
inline bool is_finite(const BFloat16* v, int64_t n) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < n; i++) largest = std::max<uint16_t>(largest, v[i].x & 0x7fff);
  return largest < 0x7f80;
}

}  // namespace isobit
