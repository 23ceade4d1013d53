// The loops that add along a Schedule: sums of columns, sums of one row, and merges of tiles.
//
// No loop may be contracted, reassociated or vectorised along the summed axis. The build passes
// -ffp-contract=off and never -ffast-math, and every loop below runs across independent outputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "clones.h"
#include "lanes.h"
#include "order.h"

namespace isobit {

constexpr int64_t panel_width =
    64;  // columns of a packed panel: a tile size, not part of the order

// a = a + b: one level of the tree, for n independent sums. Both are [n].
ISOBIT_CLONES inline void merge2(float* __restrict a, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + b[i];
}

// a = (a + b) + (c + d): two levels in one pass, a third of the memory traffic of three merges.
// All are [n].
ISOBIT_CLONES inline void merge4(float* __restrict a, const float* __restrict b,
                                 const float* __restrict c, const float* __restrict d, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

// a = a + 0: folds a leaf without elements, which turns -0 into +0. `a` is [n].
ISOBIT_CLONES inline void add_empty_leaf(float* a, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + 0.0f;
}

// lane = lane + row: one token, for n columns. Both are [n].
template <class T>
inline void add_row(float* __restrict lane, const T* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; i++) lane[i] = lane[i] + static_cast<float>(row[i]);
}

// Sums of `columns` columns over a schedule: leaves are folded and segments merged.
class ColumnSum {
 public:
  ColumnSum(const Schedule& schedule, int64_t columns)
      : schedule_(schedule),
        columns_(columns),
        stack_(stack_depth(schedule) * columns),
        leaf_(columns) {}

  // `sum_leaf(i, dst)` writes the sum of leaf i of the schedule to dst [columns].
  // `out` is [roots][columns], row stride = root_stride: one row per root of the schedule's tree.
  template <class SumLeaf>
  void run(const SumLeaf& sum_leaf, float* out, int64_t root_stride) {
    Node nodes[64];  // of the sums on the stack
    int64_t top = 0, leaf = 0;
    for (int64_t s = 0; s < schedule_.segment_count(); s++) {
      float* segment_sum = stack_.data() + top * columns_;  // [columns]
      for (; leaf < schedule_.segment_end[s]; leaf++) {
        const bool fold = schedule_.leaves[leaf].fold;
        sum_leaf(leaf, fold ? leaf_.data() : segment_sum);
        if (fold) merge2(segment_sum, leaf_.data(), columns_);
      }
      nodes[top++] = {0, schedule_.first_segment + s};
      while (top > 1 && nodes[top - 1].index % 2 && nodes[top - 2].level == nodes[top - 1].level) {
        float* left = stack_.data() + (top - 2) * columns_;  // [2][columns]: the two siblings
        merge2(left, left + columns_, columns_);
        top--;
        nodes[top - 1] = {nodes[top].level + 1, nodes[top].index / 2};
      }
    }
    for (int64_t root = 0; root < top; root++)
      for (int64_t i = 0; i < columns_; i++)
        out[root * root_stride + i] = canonical_nan(stack_[root * columns_ + i]);
  }

  // Sums rows in memory (the bias gradient). `rows` is [tokens][columns], row stride = row_stride;
  // `out` as above.
  template <class T>
  void run(const T* rows, int64_t row_stride, float* out, int64_t root_stride) {
    lanes_.resize(lane_count * columns_);
    auto sum_leaf = [&](int64_t leaf, float* dst) {
      sum_striped(schedule_.leaves[leaf], rows, row_stride, dst);
    };
    run(sum_leaf, out, root_stride);
  }

 private:
  // A part of an extent may begin and end at any segment. At most one node per level then waits for
  // a left sibling, and one for a right sibling.
  static int64_t stack_depth(const Schedule& schedule) {
    int64_t depth = 2;
    for (size_t segments = schedule.segment_end.size(); segments > 1; segments /= 2) depth += 2;
    return depth;
  }

  // Sums one leaf to dst [columns]: token t goes to lane t % 16, in ascending order, and the lanes
  // are merged by the tree. `rows` is [tokens][columns], row stride = row_stride.
  template <class T>
  void sum_striped(const Leaf& leaf, const T* rows, int64_t row_stride, float* dst) {
    float* lanes = lanes_.data();  // [16][columns]
    std::fill(lanes, lanes + lane_count * columns_, 0.0f);
    for (int64_t t = 0; t < leaf.length; t++)
      add_row(lanes + t % lane_count * columns_, rows + (leaf.start + t) * row_stride, columns_);
    for (int64_t step = 1; step < lane_count; step *= 4)
      for (int64_t lane = 0; lane < lane_count; lane += 4 * step) {
        float* first = lanes + lane * columns_;  // [4][columns], row stride = step * columns
        merge4(first, first + step * columns_, first + 2 * step * columns_,
               first + 3 * step * columns_, columns_);
      }
    std::copy(lanes, lanes + columns_, dst);
  }

  const Schedule& schedule_;
  int64_t columns_;
  std::vector<float> stack_;  // [depth][columns]: subtrees that wait for their sibling
  std::vector<float> leaf_;   // [columns]: a leaf to be folded
  std::vector<float> lanes_;  // [16][columns]
};

// The balanced tree over sixteen lanes: neighbours, then pairs, quads and halves.
ISOBIT_INLINE float merge_lanes(const Floats& lanes) {
  const Floats two = lanes + __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11,
                                                     10, 13, 12, 15, 14);
  const Floats four =
      two + __builtin_shufflevector(two, two, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  const Floats eight = four + __builtin_shufflevector(four, four, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13,
                                                      14, 15, 8, 9, 10, 11);
  return eight[0] + eight[8];
}

// [Note: terms] The sum of a row calls `term(at, count, values)`, which sets `values` to the terms
// at positions [at, at + count), count <= 16, one per lane, and to +0 in the lanes after them. A
// lane starts from +0, so it is never -0, and adding +0 keeps its bits.

// A term may also have `term.four(at, values)`, which sets Floats4 `values` to the 64 terms from
// `at` on (see [Note: four vectors] in lanes.h).
template <class Term>
concept HasFour = requires(const Term& term, Floats4& values) { term.four(int64_t(), values); };

// One leaf of `sums` sums side by side: striped over the lanes, which are then merged.
template <int64_t sums, class Term>
ISOBIT_INLINE void sum_leaf_into(int64_t start, int64_t length, const Term& term,
                                 float (&leaf_sums)[sums]) {
  Floats lanes[sums] = {}, values[sums];
  int64_t at = 0;
  for (; at + lane_count <= length; at += lane_count) {
    term(start + at, lane_count, values);
    for (int64_t i = 0; i < sums; i++) lanes[i] = lanes[i] + values[i];
  }
  if (at < length) {
    term(start + at, length - at, values);
    for (int64_t i = 0; i < sums; i++) lanes[i] = lanes[i] + values[i];
  }
  for (int64_t i = 0; i < sums; i++) leaf_sums[i] = merge_lanes(lanes[i]);
}

// One leaf of one sum. `four` allows term.four.
template <bool four = false, class Term>
ISOBIT_INLINE float sum_leaf(int64_t start, int64_t length, const Term& term) {
  Floats lanes = {}, values;
  int64_t at = 0;
  if constexpr (four && HasFour<Term>) {
    Floats4 values4;
    for (; at + lane_count4 <= length; at += lane_count4) {
      term.four(start + at, values4);
      lanes = (((lanes + values4.a) + values4.b) + values4.c) + values4.d;
    }
  }
  for (; at < length; at += lane_count) {
    term(start + at, std::min(lane_count, length - at), values);
    lanes = lanes + values;
  }
  return merge_lanes(lanes);
}

// Subtrees that wait for their sibling, where segments are merged from left to right.
constexpr int64_t feature_tree_depth = 4;
static_assert(feature_cap == 1 << (feature_tree_depth - 1));

// One row of a feature axis, `sums` sums side by side.
template <int64_t sums, class Term>
ISOBIT_INLINE void sum_row_into(const Schedule& schedule, const Term& term, float (&totals)[sums]) {
  float stack[feature_tree_depth][sums];
  int64_t top = 0, segments = 0;
  for (const Leaf& leaf : schedule.leaves) {
    sum_leaf_into(leaf.start, leaf.length, term, stack[top++]);
    for (int64_t done = ++segments; done % 2 == 0; done /= 2, top--)
      for (int64_t i = 0; i < sums; i++) stack[top - 2][i] = stack[top - 2][i] + stack[top - 1][i];
  }
  for (int64_t i = 0; i < sums; i++) totals[i] = stack[0][i];
}

// One row of one sum. `four` allows term.four.
template <bool four = false, class Term>
ISOBIT_INLINE float sum_row(const Schedule& schedule, const Term& term) {
  float stack[feature_tree_depth];
  int64_t top = 0, segments = 0;
  for (const Leaf& leaf : schedule.leaves) {
    stack[top++] = sum_leaf<four>(leaf.start, leaf.length, term);
    for (int64_t done = ++segments; done % 2 == 0; done /= 2, top--)
      stack[top - 2] = stack[top - 2] + stack[top - 1];
  }
  return stack[0];
}

// Rounds sum(i * width + j) + bias[j] to out[i][j], for rows x cols elements.
// `bias` is [cols], or null; `out` is [rows][cols], row stride = out_stride.
template <class Out, class Sum>
ISOBIT_INLINE void round_rows(Sum sum, int64_t width, const float* bias, int64_t rows, int64_t cols,
                              Out* out, int64_t out_stride) {
  for (int64_t i = 0; i < rows; i++) {
    if (bias)
      for (int64_t j = 0; j < cols; j++)
        round_to(sum(i * width + j) + bias[j], out + i * out_stride + j);
    else
      for (int64_t j = 0; j < cols; j++) round_to(sum(i * width + j), out + i * out_stride + j);
  }
}

// round_tile(a, b, c, d, width, bias, rows, cols, out, out_stride): the last merge of one (a), two
// (a + b) or four ((a + b) + (c + d)) subtrees, the bias and the rounding, in one pass over a tile.
//   a, b, c, d  [rows][cols], row stride = width; b, or c and d, may be null
//   bias        [cols], or null
//   out         [rows][cols], row stride = out_stride
#define ISOBIT_ROUND_TILE(Out)                                                                    \
  ISOBIT_CLONES inline void round_tile(const float* __restrict a, const float* __restrict b,      \
                                       const float* __restrict c, const float* __restrict d,      \
                                       int64_t width, const float* __restrict bias, int64_t rows, \
                                       int64_t cols, Out* __restrict out, int64_t out_stride) {   \
    if (c)                                                                                        \
      round_rows([=](int64_t i) { return (a[i] + b[i]) + (c[i] + d[i]); }, width, bias, rows,     \
                 cols, out, out_stride);                                                          \
    else if (b)                                                                                   \
      round_rows([=](int64_t i) { return a[i] + b[i]; }, width, bias, rows, cols, out,            \
                 out_stride);                                                                     \
    else                                                                                          \
      round_rows([=](int64_t i) { return a[i]; }, width, bias, rows, cols, out, out_stride);      \
  }
ISOBIT_ROUND_TILE(float)
ISOBIT_ROUND_TILE(c10::BFloat16)
ISOBIT_ROUND_TILE(c10::Half)

// Rounds finished sums. Both are [n].
template <class Out>
inline void round_sums(const float* sums, int64_t n, Out* out) {
  round_tile(sums, nullptr, nullptr, nullptr, n, nullptr, 1, n, out, n);
}

// One row times four segments of a packed panel, merged: each output's chain is that of the tile
// engine (ascending, fused), and four streams of weights use more of the memory's bandwidth than
// one.
//   x      [4][length]: the row's elements of four consecutive segments
//   panel  [4][length][panel_width]
//   out    [panel_width]
ISOBIT_CLONES inline void row_by_panel4(const float* __restrict x, const float* __restrict panel,
                                        int64_t length, float* __restrict out) {
  const int64_t step = length * panel_width, ahead = 16 * panel_width;
  float sums[4][panel_width];
  for (int64_t start = 0; start < length; start += leaf_length) {
    float a[panel_width] = {}, b[panel_width] = {}, c[panel_width] = {}, d[panel_width] = {};
    for (int64_t k = start; k < std::min(length, start + leaf_length); k++) {
      const float* w = panel + k * panel_width;  // [panel_width] of the first segment
      for (int64_t i = 0; i < panel_width; i += 16)
        for (int64_t s = 0; s < 4; s++) __builtin_prefetch(w + i + s * step + ahead, 0, 3);
      for (int64_t i = 0; i < panel_width; i++) {
        a[i] = std::fma(x[k], w[i], a[i]);
        b[i] = std::fma(x[k + length], w[i + step], b[i]);
        c[i] = std::fma(x[k + 2 * length], w[i + 2 * step], c[i]);
        d[i] = std::fma(x[k + 3 * length], w[i + 3 * step], d[i]);
      }
    }
    for (int64_t i = 0; i < panel_width; i++) {
      sums[0][i] = start ? sums[0][i] + a[i] : a[i];
      sums[1][i] = start ? sums[1][i] + b[i] : b[i];
      sums[2][i] = start ? sums[2][i] + c[i] : c[i];
      sums[3][i] = start ? sums[3][i] + d[i] : d[i];
    }
  }
  for (int64_t i = 0; i < panel_width; i++)
    out[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

}  // namespace isobit
