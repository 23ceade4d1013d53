// A matrix product whose summed axis follows a Schedule, computed by the tile engine.
//
// The forward, the input gradient and the weight gradient of a linear layer are three uses of it.
//
// [Note: tiles] The product is computed in tiles of some rows by one panel of columns. For each
// tile the engine sums the leaves; finished subtrees wait on a stack of partial tiles until their
// sibling is finished; the last merge is fused with the bias and the rounding. Tile sizes and the
// split over threads are free: they are chosen by measurement and are not part of the order.
#pragma once

#include <ATen/Parallel.h>

#include "engine.h"
#include "fp_environment.h"
#include "memory.h"
#include "panels.h"
#include "sums.h"
#include "tiles.h"

namespace isobit {

// Where finished tiles go. Not owned.
template <class Out>
struct Output {
  Out* data;            // [roots][rows][cols]; one root, rounded to Out, or fp32 roots of subtrees
  int64_t row_stride;   // between rows; columns are contiguous
  int64_t root_stride;  // between roots
  const float* bias;    // [cols], or null
  bool transposed;      // the rows of the product are the columns of the output
};

// The right operand: packed panels that exist already, or a matrix to be packed panel by panel.
template <class T>
struct RightOperand {
  Operand<T> matrix;
  const T* packed;  // [panels][packed length][panel_width], or null. Not owned.
};

// Per-thread buffers of a product.
enum ScratchSlot { panels_slot, stack_slot, pairs_slot, slot_count };

// [floats], uninitialised. Owned by the thread, and valid until its next call for that slot.
inline float* scratch(int64_t floats, ScratchSlot slot) {
  thread_local Scratch buffers[slot_count];
  return buffers[slot].floats(floats);
}

template <class T, class Out>
class Product {
 public:
  // `rows` and `cols` are those of the product: left is [rows][summed], right [cols][summed].
  Product(const Schedule& schedule, Operand<T> left, RightOperand<T> right, Output<Out> output,
          int64_t rows, int64_t cols)
      : schedule_(schedule),
        packed_leaves_(schedule),
        left_(left),
        right_(right),
        output_(output),
        rows_(rows),
        cols_(cols) {
    segments_ = schedule.segment_count();
    left_in_place_ = !packed_leaves_.padded;
    for (size_t i = 0; i < schedule.leaves.size(); i++) {
      const MatrixView<T> leaf = left_.at(i, schedule.leaves[i]);
      left_in_place_ = left_in_place_ && leaf.summed_stride == 1 &&
                       (rows == 1 || leaf.kept_stride >= schedule.leaves[i].length);
    }
    // A weight that is packed already has full panels; others need no more columns than there are.
    width_ = right.packed ? panel_width : std::min(panel_width, (cols + 15) / 16 * 16);
    tile_rows_ = width_ <= Tiling<T>::narrow_width ? Tiling<T>::narrow_rows : Tiling<T>::rows;
    // Every four segments are then one subtree of the tree: their count is a power of two.
    const bool quads = segments_ % 4 == 0 && schedule.first_segment == 0;
    single_row_ = !paired<T> && rows == 1 && right.packed && !output.transposed &&
                  left_.leaves.empty() && left_in_place_ && quads;
  }

  void run() {
    if (rows_ == 0 || cols_ == 0) return;
    const int64_t panels = (cols_ + width_ - 1) / width_;
    const int64_t tiles = (rows_ + tile_rows_ - 1) / tile_rows_;
    const int64_t threads = at::get_num_threads();
    const at::Tensor owner = left_in_place_ ? at::Tensor() : pack_left(tiles);
    const int64_t panel_bytes = std::max<int64_t>(packed_leaves_.length * width_ * sizeof(T), 1);
    // As many panels per group as fit, and as many groups as divide evenly among the threads.
    const int64_t most = std::clamp<int64_t>(Tiling<T>::group_bytes / panel_bytes, 1, 16);
    const int64_t rounds = (panels + threads * most - 1) / (threads * most);
    const int64_t group = (panels + threads * rounds - 1) / (threads * rounds);
    const int64_t groups = (panels + group - 1) / group;
    // With few columns, split the rows too, so that every thread has work.
    const int64_t splits = std::clamp<int64_t>((threads + groups - 1) / groups, 1, tiles);
    at::parallel_for(0, groups * splits, 1, [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      for (int64_t task = begin; task < end; task++) {
        const int64_t g = task / splits, split = task % splits;
        run_group(g * group, std::min(panels, (g + 1) * group), tiles * split / splits,
                  tiles * (split + 1) / splits);
      }
      engine::brgemm_release(paired<T>);
    });
  }

 private:
  void run_group(int64_t panel_begin, int64_t panel_end, int64_t tile_begin, int64_t tile_end) {
    const int64_t panel_size = packed_leaves_.length * width_;
    const T* panels;  // [panel_end - panel_begin][packed length][width]
    if (right_.packed) {
      panels = right_.packed + panel_begin * panel_size;
    } else {
      const int64_t floats = (panel_end - panel_begin) * panel_size * sizeof(T) / 4 + 1;
      T* buffer = reinterpret_cast<T*>(scratch(floats, panels_slot));  // as panels
      pack_panels(right_.matrix, schedule_, packed_leaves_, {panel_begin, panel_end, width_, cols_},
                  buffer);
      panels = buffer;
    }
    if (single_row_) return run_single_row(panels, panel_begin, panel_end);
    float* stack = scratch(TileStack<T>::floats, stack_slot);  // see TileStack::memory
    for (int64_t t = tile_begin; t < tile_end; t++) {
      const int64_t row = t * tile_rows_, rows = std::min(tile_rows_, rows_ - row);
      for (int64_t p = panel_begin; p < panel_end; p++)
        run_tile({row, rows, p * width_, std::min(width_, cols_ - p * width_)},
                 panels + (p - panel_begin) * panel_size, stack);
    }
  }

  // One row times packed fp32 panels, four segments at a time.
  // `panels` is [panel_end - panel_begin][segments][length][panel_width].
  void run_single_row(const T* panels, int64_t panel_begin, int64_t panel_end) {
    if constexpr (!paired<T>) {
      const int64_t length = packed_leaves_.length / segments_, quads = segments_ / 4;
      float* sums = scratch(2 * panel_width, stack_slot);  // [quads][panel_width]
      static_assert(feature_cap == 8);
      for (int64_t p = panel_begin; p < panel_end; p++) {
        const T* panel =  // [segments][length][panel_width]
            panels + (p - panel_begin) * packed_leaves_.length * panel_width;
        for (int64_t q = 0; q < quads; q++)
          row_by_panel4(left_.whole.data + 4 * q * length, panel + 4 * q * length * panel_width,
                        length, sums + q * panel_width);
        Subtrees subtrees{sums};
        if (quads > 1) subtrees.b = sums + panel_width;
        const int64_t col = p * panel_width;
        write_tile(subtrees, {0, 1, col, std::min(panel_width, cols_ - col)}, 0, nullptr);
      }
    }
  }

  // Copies rows whose summed axis is not contiguous, once for all panels, to [leaf][rows][length].
  // The engine keeps generated code per stride; the length of a leaf takes few values, where the
  // stride of a batch may take any. Returns the owner of left_packed_.
  at::Tensor pack_left(int64_t tiles) {
    at::Tensor owner =
        empty_tensor({rows_, packed_leaves_.length}, c10::CppTypeToScalarType<T>::value);
    T* packed = owner.template mutable_data_ptr<T>();  // per leaf: [rows][padded length]
    at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(  // [longest leaf / 2][rows]
          scratch(paired<T> ? packed_leaves_.longest / 2 * tile_rows_ : 0, pairs_slot));
      for (int64_t t = begin; t < end; t++)
        for (size_t i = 0; i < schedule_.leaves.size(); i++) {
          const int64_t row = t * tile_rows_;
          const Leaf& leaf = schedule_.leaves[i];
          const int64_t stride = padded_length(leaf.length, packed);
          T* dst = packed + packed_leaves_.offset[i] * rows_ + row * stride;  // [rows][stride]
          pack_rows(left_.at(i, leaf).from(row, 0), leaf.length, std::min(tile_rows_, rows_ - row),
                    RowMajor<T>{dst, stride}, pairs);
        }
    });
    left_packed_ = packed;
    return owner;
  }

  // `panel` is [packed length][width]; `memory` is as TileStack::memory.
  void run_tile(const Tile& tile, const T* panel, float* memory) {
    TileStack<T> stack(memory);
    const int64_t first_segment = schedule_.first_segment;
    int64_t leaf = 0, pending = 1;
    for (int64_t s = 0; s < segments_; s++) {
      const bool last = s == segments_ - 1;
      if (last) prefetch_output(tile);
      if (joins_left_sibling(s, leaf)) {
        add_leaf(tile, panel, leaf++, stack.slot(stack.top - 1), true);
        stack.nodes[stack.top - 1] = {1, stack.nodes[stack.top - 1].index / 2};
      } else {
        float* sum = stack.slot(stack.top);  // [rows][width]
        for (; leaf < schedule_.segment_end[s]; leaf++)
          add_leaf(tile, panel, leaf, sum, schedule_.leaves[leaf].fold);
        stack.nodes[stack.top++] = {0, first_segment + s};
      }
      pending =
          stack.merge_complete(first_segment, first_segment + segments_, tile.rows * width_, last);
    }
    write_roots(stack, pending, tile);
  }

  // The fp32 engine adds a finished chain to the content of the tile. For the right one of two
  // sibling segments that is their merge, without a pass of its own. (The bf16 engine continues the
  // chain instead, which is another order.)
  bool joins_left_sibling(int64_t s, int64_t leaf) const {
    return !paired<T> && s > 0 && (schedule_.first_segment + s) % 2 == 1 &&
           schedule_.segment_end[s] == leaf + 1 && schedule_.leaves[leaf].length > 0;
  }

  // The rows of the output are far apart in memory. Prefetched before the last segment is computed,
  // they are in cache when the tile is written.
  void prefetch_output(const Tile& tile) const {
    const Out* first =  // [lines][length], row stride = output_.row_stride
        output_.data + (output_.transposed ? tile.col * output_.row_stride + tile.row
                                           : tile.row * output_.row_stride + tile.col);
    const int64_t lines = output_.transposed ? tile.cols : tile.rows;
    const int64_t length = output_.transposed ? tile.rows : tile.cols;
    for (int64_t i = 0; i < lines; i++)
      for (int64_t j = 0; j < length; j += 64 / sizeof(Out))
        __builtin_prefetch(first + i * output_.row_stride + j, 1, 2);
  }

  // Leaf i into sum [rows][width]. `panel` is [packed length][width].
  void add_leaf(const Tile& tile, const T* panel, int64_t i, float* sum, bool accumulate) {
    const Leaf& leaf = schedule_.leaves[i];
    if (leaf.length == 0) {  // a sample without tokens is +0.0, and is added
      if (accumulate)
        add_empty_leaf(sum, tile.rows * width_);
      else
        std::fill(sum, sum + tile.rows * width_, 0.0f);
      return;
    }
    const int64_t length = padded_length(leaf.length, panel);
    const MatrixView<T> rows =
        left_in_place_ ? left_.at(i, leaf)
                       : MatrixView<T>{left_packed_ + packed_leaves_.offset[i] * rows_, length, 1};
    // The stride of a single row has no meaning, but the engine checks it.
    const int64_t stride = rows_ == 1 ? std::max(rows.kept_stride, length) : rows.kept_stride;
    const T* left = rows.data + tile.row * rows.kept_stride;     // [rows][length]
    const T* right = panel + packed_leaves_.offset[i] * width_;  // [length][width]
    if (tile.rows <= 16) {  // few rows are bound by memory: prefetch the next leaf
      const char* next = reinterpret_cast<const char*>(right + length * width_);  // [bytes]
      const int64_t bytes = length * width_ * static_cast<int64_t>(sizeof(T));
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 3);
    }
    multiply_leaf<T>({tile.rows, width_, length}, {left, stride}, {right, width_}, {sum, width_},
                     accumulate);
  }

  // Writes every root; `pending` is what the last merge_complete returned.
  void write_roots(const TileStack<T>& stack, int64_t pending, const Tile& tile) {
    float* transposed = stack.slot(TileStack<T>::depth);  // [cols][rows]
    if (pending == 1) {
      for (int64_t root = 0; root < stack.top; root++)
        write_tile({stack.slot(root)}, tile, root, transposed);
      return;
    }
    Subtrees subtrees{stack.slot(0), stack.slot(1)};
    if (pending == 4) {
      subtrees.c = stack.slot(2);
      subtrees.d = stack.slot(3);
    }
    if (output_.transposed) {  // merged first, so that one tile is transposed
      if (pending == 4)
        merge4(subtrees.a, subtrees.b, subtrees.c, subtrees.d, tile.rows * width_);
      else
        merge2(subtrees.a, subtrees.b, tile.rows * width_);
      subtrees = {subtrees.a};
    }
    write_tile(subtrees, tile, 0, transposed);
  }

  // `transposed` is [cols][rows], scratch for a transposed output; otherwise unused.
  void write_tile(const Subtrees& subtrees, const Tile& tile, int64_t root, float* transposed) {
    const auto [a, b, c, d] = subtrees;
    const int64_t stride = output_.row_stride;
    Out* out = output_.data + root * output_.root_stride;  // [rows][cols] of the output
    if (output_.transposed) {
      transpose_words(as_words(a), width_, as_words(transposed), tile.rows, tile.rows, tile.cols);
      const float* bias = output_.bias ? output_.bias + tile.row : nullptr;  // [tile.rows]
      round_tile(transposed, nullptr, nullptr, nullptr, tile.rows, bias, tile.cols, tile.rows,
                 out + tile.col * stride + tile.row, stride);
    } else {
      const float* bias = output_.bias ? output_.bias + tile.col : nullptr;  // [tile.cols]
      round_tile(a, b, c, d, width_, bias, tile.rows, tile.cols, out + tile.row * stride + tile.col,
                 stride);
    }
  }

  const Schedule& schedule_;
  PackedLeaves<T> packed_leaves_;
  Operand<T> left_;
  const T* left_packed_ = nullptr;  // per leaf: [rows][padded length]. Owned by run().
  RightOperand<T> right_;
  Output<Out> output_;
  int64_t rows_, cols_, segments_;
  int64_t width_, tile_rows_;  // columns of a panel, rows of a tile
  bool left_in_place_;         // the engine reads the left operand where it is
  bool single_row_;            // see run_single_row
};

}  // namespace isobit
