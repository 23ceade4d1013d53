// The order of addition on the CPU: the plan of an extent, and the loops that add along it.
//
// The definition is src/isobit/order/, in Python; tests hold this file equal to it, extent by
// extent. No loop may be contracted, reassociated or vectorised along the summed axis: the build
// passes -ffp-contract=off and never -ffast-math, and every loop below runs across independent
// outputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "clones.h"
#include "layout.h"

namespace isobit {

// Constants of version 1 of the order.
constexpr int64_t feature_unit = 256, feature_cap = 16, sample_cap = 1024;
constexpr int64_t panel_width = 64;  // columns of a packed panel: a tile size, no part of the order
constexpr int64_t long_segment = 1024, feature_leaf = 512, token_leaf = 256, lane_count = 16;

// A run of consecutive elements that the tile engine sums by one chain. `fold` adds it to the
// segment's accumulator; the first leaf of a segment starts from zero instead.
struct Leaf {
  int64_t start, length;
  bool fold;
};

// Consecutive segments of a larger extent, each a list of leaves; `first` is the index of the first
// one in the whole problem, which decides who merges with whom.
struct Schedule {
  std::vector<Leaf> leaves;
  std::vector<int64_t> segment_end;  // index into leaves, one past each segment
  int64_t first = 0;
};

inline int64_t count_segments(int64_t extent, int64_t unit, int64_t cap) {
  int64_t count = 1;
  while (extent > 0 && count * 2 <= cap && extent % (count * 2) == 0 &&
         extent / (count * 2) >= unit)
    count *= 2;
  return count;
}

inline void push_run(Schedule& schedule, int64_t start, int64_t length, int64_t leaf, bool fold) {
  if (length == 0) schedule.leaves.push_back({start, 0, fold});
  for (int64_t at = 0; at < length; at += leaf)
    schedule.leaves.push_back({start + at, std::min(leaf, length - at), fold || at > 0});
}

// `segments` of them from `first` on; positions are counted from the start of the share.
inline Schedule feature_schedule(int64_t extent, int64_t first, int64_t segments) {
  Schedule schedule;
  schedule.first = first;
  int64_t length = extent / count_segments(extent, feature_unit, feature_cap);
  for (int64_t s = 0; s < segments; s++) {
    push_run(schedule, s * length, length,
             length > long_segment ? feature_leaf : std::max<int64_t>(length, 1), false);
    schedule.segment_end.push_back(schedule.leaves.size());
  }
  return schedule;
}

// `spans` holds (first row, rows) of each sample of this share; the share starts at sample `first`
// of `global`.
inline Schedule sample_schedule(const int64_t* spans, int64_t count, int64_t first,
                                int64_t global) {
  Schedule schedule;
  int64_t size = std::max<int64_t>(global / count_segments(global, 1, sample_cap), 1);
  schedule.first = first / size;
  for (int64_t i = 0; i < count; i++) {
    push_run(schedule, spans[2 * i], spans[2 * i + 1], token_leaf, i % size != 0);
    if (i % size == size - 1) schedule.segment_end.push_back(schedule.leaves.size());
  }
  return schedule;
}

// Items that are each a sum of their own (heads, samples with heads): one a leaf, folded left in a
// segment. They are all of `global` items, or one subtree of them.
inline Schedule item_schedule(int64_t count, int64_t cap, int64_t global) {
  Schedule schedule;
  const int64_t size = std::max<int64_t>(global / count_segments(global, 1, cap), 1);
  for (int64_t i = 0; i < count; i++) {
    schedule.leaves.push_back({i, 1, i % size != 0});
    if (i % size == size - 1) schedule.segment_end.push_back(schedule.leaves.size());
  }
  return schedule;
}

// A finished subtree on the stack of partial tiles: which slot holds it, and which node of the tree
// it is.
struct Node {
  int64_t level, index;
};

// ---- the additions
// -------------------------------------------------------------------------------------

ISOBIT_CLONES inline void merge2(float* __restrict a, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + b[i];
}

// Two levels of the tree in one pass: a third of the traffic of three merges.
ISOBIT_CLONES inline void merge4(float* __restrict a, const float* __restrict b,
                                 const float* __restrict c, const float* __restrict d, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

ISOBIT_CLONES inline void add_absent(float* a, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = a[i] + 0.0f;
}

// One token into every column's lane.
template <class T>
inline void add_row(float* __restrict lane, const T* __restrict row, int64_t n) {
  for (int64_t i = 0; i < n; i++) lane[i] = lane[i] + static_cast<float>(row[i]);
}

// The sum of `columns` columns over a schedule: leaves are folded and segments merged as the
// products' are.
class ColumnSum {
 public:
  ColumnSum(const Schedule& schedule, int64_t columns)
      : schedule_(schedule),
        columns_(columns),
        stack_(depth_of(schedule) * columns),
        leaf_(columns) {}

  // `sum_leaf(index, to)` writes the sum of the schedule's leaf of that index.
  template <class SumLeaf>
  void run(const SumLeaf& sum_leaf, float* out, int64_t root_stride) {
    Node nodes[64];
    int64_t top = 0, leaf = 0;
    for (size_t s = 0; s < schedule_.segment_end.size(); s++) {
      float* sum = stack_.data() + top * columns_;
      for (; leaf < schedule_.segment_end[s]; leaf++) {
        const bool fold = schedule_.leaves[leaf].fold;
        sum_leaf(leaf, fold ? leaf_.data() : sum);
        if (fold) merge2(sum, leaf_.data(), columns_);
      }
      nodes[top++] = {0, schedule_.first + static_cast<int64_t>(s)};
      while (top > 1 && nodes[top - 1].index % 2 && nodes[top - 2].level == nodes[top - 1].level) {
        float* left = stack_.data() + (top - 2) * columns_;
        merge2(left, left + columns_, columns_);
        top--;
        nodes[top - 1] = {nodes[top].level + 1, nodes[top].index / 2};
      }
    }
    for (int64_t root = 0; root < top; root++)
      for (int64_t i = 0; i < columns_; i++)
        out[root * root_stride + i] = one_nan(stack_[root * columns_ + i]);
  }

  // Of rows in memory (the bias gradient): a plain sum's leaf is striped over 16 lanes.
  template <class T>
  void run(const T* rows, int64_t row_stride, float* out, int64_t root_stride) {
    lanes_.resize(lane_count * columns_);
    run([&](int64_t leaf, float* to) { stripe(schedule_.leaves[leaf], rows, row_stride, to); }, out,
        root_stride);
  }

 private:
  // A share may begin and end anywhere: a node waits on each level to its left, and on each to its
  // right.
  static int64_t depth_of(const Schedule& schedule) {
    int64_t depth = 2;
    for (size_t segments = schedule.segment_end.size(); segments > 1; segments /= 2) depth += 2;
    return depth;
  }

  // Token t of the leaf goes to lane t % 16, ascending; the lanes are merged by the tree.
  template <class T>
  void stripe(const Leaf& leaf, const T* rows, int64_t row_stride, float* to) {
    float* lanes = lanes_.data();
    std::fill(lanes, lanes + lane_count * columns_, 0.0f);
    for (int64_t t = 0; t < leaf.length; t++)
      add_row(lanes + t % lane_count * columns_, rows + (leaf.start + t) * row_stride, columns_);
    for (int64_t step = 1; step < lane_count; step *= 4)
      for (int64_t lane = 0; lane < lane_count; lane += 4 * step) {
        float* at = lanes + lane * columns_;
        merge4(at, at + step * columns_, at + 2 * step * columns_, at + 3 * step * columns_,
               columns_);
      }
    std::copy(lanes, lanes + columns_, to);
  }

  const Schedule& schedule_;
  int64_t columns_;
  std::vector<float> stack_, leaf_, lanes_;
};

// The balanced tree over sixteen lanes; each lane meets its neighbour, then pairs meet, and lane 0
// has it all.
ISOBIT_INLINE float merge_lanes(const Floats& lanes) {
  const Floats two = lanes + __builtin_shufflevector(lanes, lanes, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11,
                                                     10, 13, 12, 15, 14);
  const Floats four =
      two + __builtin_shufflevector(two, two, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  const Floats eight = four + __builtin_shufflevector(four, four, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13,
                                                      14, 15, 8, 9, 10, 11);
  return eight[0] + eight[8];
}

// A row sum's leaf, of several sums side by side: striped over the lanes, which are merged.
template <int64_t sums, class Term>
ISOBIT_INLINE void sum_leaf_into(int64_t start, int64_t length, const Term& term,
                                 float (&runs)[sums]) {
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
  for (int64_t i = 0; i < sums; i++) runs[i] = merge_lanes(lanes[i]);
}

// Sums of one row of a feature axis, side by side. `term(at, count, values)` gives `count` terms of
// each from `at` on, one a lane, +0 in the lanes after them: a lane starts from +0, so it is never
// -0, and adding +0 leaves its bits.
template <int64_t sums, class Term>
ISOBIT_INLINE void sum_row_into(const Schedule& schedule, const Term& term, float (&totals)[sums]) {
  constexpr int64_t depth = 5;  // of at most 16 segments
  static_assert(feature_cap == 1 << (depth - 1));
  float stack[sums][depth];
  int64_t top = 0, leaf = 0;
  for (int64_t s = 0; s < static_cast<int64_t>(schedule.segment_end.size()); s++) {
    float sum[sums] = {};
    for (; leaf < schedule.segment_end[s]; leaf++) {
      const auto [start, length, fold] = schedule.leaves[leaf];
      float runs[sums];
      sum_leaf_into(start, length, term, runs);
      for (int64_t i = 0; i < sums; i++) sum[i] = fold ? sum[i] + runs[i] : runs[i];
    }
    for (int64_t i = 0; i < sums; i++) stack[i][top] = sum[i];
    top++;
    for (int64_t done = s + 1; done % 2 == 0; done /= 2, top--)
      for (int64_t i = 0; i < sums; i++) stack[i][top - 2] = stack[i][top - 2] + stack[i][top - 1];
  }
  for (int64_t i = 0; i < sums; i++) totals[i] = stack[i][0];
}

// One sum of a row or a leaf, whose term takes one vector.
template <class Term>
struct OneSum {
  const Term& term;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats (&values)[1]) const {
    term(at, count, values[0]);
  }
};
template <class Term>
ISOBIT_INLINE float sum_row(const Schedule& schedule, const Term& term) {
  float total[1];
  sum_row_into(schedule, OneSum<Term>{term}, total);
  return total[0];
}
template <class Term>
ISOBIT_INLINE float sum_leaf(int64_t start, int64_t length, const Term& term) {
  float total[1];
  sum_leaf_into(start, length, OneSum<Term>{term}, total);
  return total[0];
}

// The last merge of one, two or four subtrees, the bias and the rounding, in one pass over a tile.
template <class Out, class Sum>
ISOBIT_INLINE void finish_rows(Sum sum, int64_t width, const float* bias, int64_t rows,
                               int64_t cols, Out* out, int64_t stride) {
  for (int64_t i = 0; i < rows; i++) {
    if (bias)
      for (int64_t j = 0; j < cols; j++)
        round_to(sum(i * width + j) + bias[j], out + i * stride + j);
    else
      for (int64_t j = 0; j < cols; j++) round_to(sum(i * width + j), out + i * stride + j);
  }
}
#define ISOBIT_FINISH(Out)                                                                       \
  ISOBIT_CLONES inline void finish(const float* __restrict a, const float* __restrict b,         \
                                   const float* __restrict c, const float* __restrict d,         \
                                   int64_t width, const float* __restrict bias, int64_t rows,    \
                                   int64_t cols, Out* __restrict out, int64_t stride) {          \
    if (c)                                                                                       \
      finish_rows([=](int64_t i) { return (a[i] + b[i]) + (c[i] + d[i]); }, width, bias, rows,   \
                  cols, out, stride);                                                            \
    else if (b)                                                                                  \
      finish_rows([=](int64_t i) { return a[i] + b[i]; }, width, bias, rows, cols, out, stride); \
    else                                                                                         \
      finish_rows([=](int64_t i) { return a[i]; }, width, bias, rows, cols, out, stride);        \
  }
ISOBIT_FINISH(float)
ISOBIT_FINISH(c10::BFloat16)
ISOBIT_FINISH(c10::Half)

// One row of x against four segments of a packed panel at once: each output's chain is the tile
// engine's (ascending, fused), and four streams of weights keep memory busier than one.
ISOBIT_CLONES inline void row_by_panel4(const float* __restrict x, const float* __restrict panel,
                                        int64_t length, float* __restrict out) {
  const int64_t step = length * panel_width, ahead = 16 * panel_width;
  float a[panel_width] = {}, b[panel_width] = {}, c[panel_width] = {}, d[panel_width] = {};
  for (int64_t k = 0; k < length; k++) {
    const float* w = panel + k * panel_width;
    for (int64_t i = 0; i < panel_width; i += 16)
      for (int64_t s = 0; s < 4; s++) __builtin_prefetch(w + i + s * step + ahead, 0, 3);
    for (int64_t i = 0; i < panel_width; i++) {
      a[i] = std::fma(x[k], w[i], a[i]);
      b[i] = std::fma(x[k + length], w[i + step], b[i]);
      c[i] = std::fma(x[k + 2 * length], w[i + 2 * step], c[i]);
      d[i] = std::fma(x[k + 3 * length], w[i + 3 * step], d[i]);
    }
  }
  for (int64_t i = 0; i < panel_width; i++) out[i] = (a[i] + b[i]) + (c[i] + d[i]);
}

}  // namespace isobit
