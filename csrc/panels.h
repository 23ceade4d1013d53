// The right operand of a product as packed panels, leaf by leaf.
#pragma once

#include <vector>

#include "order.h"
#include "packing.h"

namespace isobit {

// An operand in memory: one matrix, or one matrix per leaf of the schedule. Owns no elements.
template <class T>
struct Operand {
  Operand(MatrixView<T> whole) : whole(whole) {}
  explicit Operand(std::vector<MatrixView<T>> leaves)
      : whole(leaves[0]), leaves(std::move(leaves)) {}

  // Leaf i: [kept][leaf.length].
  MatrixView<T> at(size_t i, const Leaf& leaf) const {
    return leaves.empty() ? whole.from(0, leaf.start) : leaves[i];
  }

  MatrixView<T> whole;                // [kept][summed]
  std::vector<MatrixView<T>> leaves;  // if not empty, per leaf: [kept][leaf.length]
};

// Where the leaves begin in packed form.
template <class T>
struct PackedLeaves {
  std::vector<int64_t> offset;  // per leaf: elements of the summed axis before it, with padding
  int64_t length = 0;           // elements of the summed axis, with padding
  int64_t longest = 0;          // elements of the longest leaf, with padding
  bool padded = false;          // some leaf has an odd length, and T is packed in pairs

  explicit PackedLeaves(const Schedule& schedule) {
    for (const Leaf& leaf : schedule.leaves) {
      const int64_t packed = padded_length(leaf.length, static_cast<const T*>(nullptr));
      offset.push_back(length);
      length += packed;
      longest = std::max(longest, packed);
      padded = padded || packed != leaf.length;
    }
  }
};

// Panels [begin, end) of a matrix of `cols` columns, each `width` columns wide.
struct PanelRange {
  int64_t begin, end, width, cols;
};

// Packs panels to dst [end - begin][packed length][width]. Goes leaf by leaf, because neighbouring
// panels share the pages in which the rows of a leaf lie.
template <class T>
void pack_panels(const Operand<T>& columns, const Schedule& schedule, const PackedLeaves<T>& packed,
                 const PanelRange& panels, T* dst) {
  const int64_t width = panels.width;
  for (size_t i = 0; i < schedule.leaves.size(); i++) {
    const Leaf& leaf = schedule.leaves[i];
    for (int64_t p = panels.begin; p < panels.end; p++)
      pack_columns(columns.at(i, leaf).from(p * width, 0), leaf.length,
                   std::min(width, panels.cols - p * width), width,
                   dst + ((p - panels.begin) * packed.length + packed.offset[i]) * width);
  }
}

}  // namespace isobit
