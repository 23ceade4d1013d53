// Tiles of a product, and the stack of partial tiles on which finished subtrees are merged.
#pragma once

#include "engine.h"
#include "order.h"
#include "sums.h"

namespace isobit {

template <class T>
struct Tiling {
  static constexpr int64_t rows = paired<T> ? 128 : 192;
  // With few columns the product is bound by memory, and every row is in a page of its own. At
  // K = 4096, tiles of 128 rows ran at a third of the speed of tiles of 32.
  static constexpr int64_t narrow_width = 32, narrow_rows = 32;
  // The panels that a tile of rows is multiplied with before the next one have this size in all.
  static constexpr int64_t group_bytes = 1 << 22;
};

// Rows [row, row + rows) and columns [col, col + cols) of a product.
struct Tile {
  int64_t row, rows, col, cols;
};

// Up to four sibling subtrees, each [rows][width], row stride = width. Null where there is none.
struct Subtrees {
  float *a, *b = nullptr, *c = nullptr, *d = nullptr;
};

// Partial tiles of subtrees that wait for their sibling. T is the element type of the operands.
template <class T>
struct TileStack {
  static constexpr int64_t tile_size = Tiling<T>::rows * panel_width;  // floats of a whole tile
  static constexpr int64_t depth = 32;
  static constexpr int64_t floats = tile_size * (depth + 1);  // of the memory

  explicit TileStack(float* memory) : memory(memory) {}

  float* memory;      // [depth + 1][tile_size], not owned; the last slot is for transposing
  Node nodes[depth];  // of the subtrees on the stack
  int64_t top = 0;

  float* slot(int64_t i) const { return memory + i * tile_size; }  // [rows][width]

  // Merges the complete subtrees of `n` floats, two levels at a time where segments [begin, end)
  // contain all four of a quad. Leaves the merge that would produce the only root to round_tile,
  // and returns how many subtrees that has to merge.
  int64_t merge_complete(int64_t begin, int64_t end, int64_t n, bool last) {
    while (top > 1) {
      const Node node = nodes[top - 1];
      if (node.index % 2 == 0) return 1;
      const int64_t quad = node.index / 4 * 4;
      // Where the engine may join two segments, pairs come first, and quads are made of pairs.
      const bool whole_quad = (paired<T> || node.level > 0) && (quad << node.level) >= begin &&
                              ((quad + 4) << node.level) <= end;
      if (whole_quad && node.index % 4 == 1) return 1;
      const int64_t merged = whole_quad ? 4 : 2;
      if (nodes[top - 2].level != node.level) return 1;  // the sibling belongs to another call
      TORCH_INTERNAL_ASSERT(top >= merged);
      if (last && top == merged) return merged;
      float* left = slot(top - merged);  // [merged][tile_size]
      if (whole_quad)
        merge4(left, left + tile_size, left + 2 * tile_size, left + 3 * tile_size, n);
      else
        merge2(left, left + tile_size, n);
      top -= merged - 1;
      nodes[top - 1] =
          whole_quad ? Node{node.level + 2, quad / 4} : Node{node.level + 1, node.index / 2};
    }
    return 1;
  }
};

}  // namespace isobit
