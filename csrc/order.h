// The order of addition on the CPU: which elements form a leaf, and how leaves are merged.
//
// [Note: the order of addition] Every sum has one order, which depends only on the length of the
// summed axis of the whole problem (its extent), never on tiles, threads, batch or ranks:
//   - the extent is divided into S equal segments, S a power of two (count_segments);
//   - a segment of products, or of a sample's tokens, has leaves of 256; a leaf is summed by one
//     chain, and leaves are folded left: ((leaf 0 + leaf 1) + leaf 2);
//   - a segment of a row sum (norms, softmax) is one leaf, striped over lanes;
//   - the segments are merged by the balanced binary tree: neighbours first, then pairs of pairs.
// The definition is src/isobit/order/, in Python. Tests compare the schedules below with it, extent
// by extent, and the contracts of the operators reveal the order that each kernel really uses.
//
// Every addition of terms of a sum follows a Schedule made here. The loops are in sums.h, and in
// product.h for the tile engine; a sum elsewhere has a comment `Order:` that names its plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace isobit {

// Constants of version 2 of the order.
constexpr int64_t feature_unit = 256;  // a segment of a feature axis has at least this length
constexpr int64_t feature_cap = 8;     // and there are at most this many of them
constexpr int64_t sample_cap = 1024;   // at most this many segments of the sample axis
constexpr int64_t leaf_length = 256;   // of products over features, and of a sample's tokens

// Keys that attention folds from an empty state. Chunks of them are then merged left to right.
constexpr int64_t attention_chunk = 2048;

// A run of consecutive elements of the summed axis that one chain sums. `fold`: add it to the
// segment's accumulator; the first leaf of a segment starts from zero instead.
struct Leaf {
  int64_t start, length;
  bool fold;
};

// Consecutive segments of an extent, each a list of leaves. A call may hold only a part of the
// extent; the index of its first segment in the whole problem decides which segments are siblings.
struct Schedule {
  std::vector<Leaf> leaves;
  std::vector<int64_t> segment_end;  // per segment: the index after its last leaf
  int64_t first_segment = 0;

  int64_t leaf_count() const { return static_cast<int64_t>(leaves.size()); }
  int64_t segment_count() const { return static_cast<int64_t>(segment_end.size()); }
};

// A node of the binary tree over the segments: level 0 is a segment, level 1 a pair of siblings.
// Node `index` of a level covers segments [index << level, (index + 1) << level).
struct Node {
  int64_t level, index;
};

// The largest power of two that divides the extent into segments of at least `unit`, at most `cap`.
inline int64_t count_segments(int64_t extent, int64_t unit, int64_t cap) {
  int64_t count = 1;
  while (extent > 0 && count * 2 <= cap && extent % (count * 2) == 0 &&
         extent / (count * 2) >= unit)
    count *= 2;
  return count;
}

// Cuts a run into leaves; `fold` is that of the first leaf. An empty run is one leaf of length
// zero: an absent contribution is +0.0, and is added.
inline void append_leaves(Schedule& schedule, int64_t start, int64_t length, bool fold) {
  if (length == 0) schedule.leaves.push_back({start, 0, fold});
  for (int64_t at = 0; at < length; at += leaf_length)
    schedule.leaves.push_back({start + at, std::min(leaf_length, length - at), fold || at > 0});
}

// `segments` segments of a feature axis in row sums, one leaf each, from segment `first` on. Leaf
// positions are relative to the start of that segment.
inline Schedule feature_schedule(int64_t extent, int64_t first, int64_t segments) {
  Schedule schedule;
  schedule.first_segment = first;
  const int64_t length = extent / count_segments(extent, feature_unit, feature_cap);
  for (int64_t s = 0; s < segments; s++) {
    schedule.leaves.push_back({s * length, length, false});
    schedule.segment_end.push_back(s + 1);
  }
  return schedule;
}

// The same segments in products, cut into leaves.
inline Schedule product_schedule(int64_t extent, int64_t first, int64_t segments) {
  Schedule schedule;
  schedule.first_segment = first;
  const int64_t length = extent / count_segments(extent, feature_unit, feature_cap);
  for (int64_t s = 0; s < segments; s++) {
    append_leaves(schedule, s * length, length, false);
    schedule.segment_end.push_back(schedule.leaf_count());
  }
  return schedule;
}

// The whole feature axis, in row sums and in products.
inline Schedule feature_schedule(int64_t extent) {
  return feature_schedule(extent, 0, count_segments(extent, feature_unit, feature_cap));
}
inline Schedule product_schedule(int64_t extent) {
  return product_schedule(extent, 0, count_segments(extent, feature_unit, feature_cap));
}

// The tokens of `count` samples that begin at sample `first` of a global batch of `global` samples.
// `spans` is [count][2]: first row and number of rows per sample.
inline Schedule sample_schedule(const int64_t* spans, int64_t count, int64_t first,
                                int64_t global) {
  Schedule schedule;
  int64_t segment_size = std::max<int64_t>(global / count_segments(global, 1, sample_cap), 1);
  schedule.first_segment = first / segment_size;
  for (int64_t i = 0; i < count; i++) {
    append_leaves(schedule, spans[2 * i], spans[2 * i + 1], i % segment_size != 0);
    if (i % segment_size == segment_size - 1)
      schedule.segment_end.push_back(schedule.leaves.size());
  }
  return schedule;
}

// Items that are sums already (heads, or samples whose heads are summed): one leaf per item. The
// `count` items are all of the `global` ones, or one subtree of them.
inline Schedule item_schedule(int64_t count, int64_t cap, int64_t global) {
  Schedule schedule;
  const int64_t segment_size = std::max<int64_t>(global / count_segments(global, 1, cap), 1);
  for (int64_t i = 0; i < count; i++) {
    schedule.leaves.push_back({i, 1, i % segment_size != 0});
    if (i % segment_size == segment_size - 1)
      schedule.segment_end.push_back(schedule.leaves.size());
  }
  return schedule;
}

}  // namespace isobit
