// A product whose summed axis follows a Schedule, over the tile engine: forward, input gradient and
// weight gradient of a linear layer are three calls of it.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include "arithmetic.h"
#include "memory.h"
#include "order.h"

namespace isobit {

namespace engine = at::native::cpublas;

template <class T>
constexpr bool paired = sizeof(T) == 2;
constexpr int64_t engine_block =
    32;  // elements whose even and odd chains the paired engine adds at a time

// sum = left [count, length] · right [length, width], each output one chain; `onto` what stands
// there, or from zero.
//
// Given a length that 32 does not divide, the paired engine takes its largest even divisor for a
// block, and so another order (docs/decisions/0006). Whole blocks first, and the rest onto them, is
// the defined one.
template <class T>
void multiply_leaf(int64_t count, int64_t width, int64_t length, const T* left, int64_t left_stride,
                   const T* right, int64_t right_stride, float* sum, int64_t sum_stride,
                   bool onto) {
  const int64_t whole = paired<T> ? length / engine_block * engine_block : 0;
  if (whole > 0)
    engine::brgemm(count, width, whole, left_stride, right_stride, sum_stride, onto, left, right,
                   sum, paired<T>);
  if (whole < length)
    engine::brgemm(count, width, length - whole, left_stride, right_stride, sum_stride,
                   onto || whole > 0, left + whole, right + whole * right_stride, sum, paired<T>);
}

// Where finished tiles go: one matrix rounded to Out, or one fp32 matrix per root of the share's
// subtrees.
template <class Out>
struct Target {
  Out* data;
  int64_t stride;       // between rows
  int64_t root_stride;  // between roots
  const float* bias;
  bool transposed;  // the product's rows are the target's columns
};

// An operand in memory: one matrix, or for each leaf the place where its part begins.
template <class T>
struct Operand {
  Operand(View<T> whole) : whole(whole) {}
  explicit Operand(std::vector<View<T>> leaves) : whole(leaves[0]), leaves(std::move(leaves)) {}
  View<T> at(size_t i, const Leaf& leaf) const {
    return leaves.empty() ? whole.shift(0, leaf.start) : leaves[i];
  }
  View<T> whole;
  std::vector<View<T>> leaves;
};

// B as the engine wants it: packed panels made beforehand, or an operand to be packed panel by
// panel.
template <class T>
struct Columns {
  Operand<T> operand;
  const T* packed;
};

// Tiles are free in rows and columns; they are chosen by measurement, never part of the order.
template <class T>
struct Tiling {
  static constexpr int64_t rows = paired<T> ? 128 : 192;
  // Few columns: bound by memory, and every row lies in pages of its own. At K = 4096 tiles of 128
  // rows ran at a third of the speed of 32.
  static constexpr int64_t narrow = 32, narrow_rows = 32;
  static constexpr int64_t group_bytes =
      1 << 22;  // panels that a tile of rows is multiplied with in turn
};

enum Room { panels_room, stack_room, pairs_room, rooms };

inline float* scratch(int64_t floats, Room room) {
  thread_local Scratch buffers[rooms];
  return buffers[room].floats(floats);
}

// Positions of the leaves in packed form.
template <class T>
struct Packing {
  std::vector<int64_t> at;
  int64_t length = 0;  // elements of the summed axis, padded
  bool even = true;
  explicit Packing(const Schedule& schedule) {
    for (const Leaf& leaf : schedule.leaves) {
      at.push_back(length);
      length += padded(leaf.length, static_cast<const T*>(nullptr));
      even = even && padded(leaf.length, static_cast<const T*>(nullptr)) == leaf.length;
    }
  }
};

// Panels [begin, end) of `width` columns, leaf by leaf: neighbours share the pages that a leaf's
// rows lie in.
template <class T>
void pack_panels(const Operand<T>& columns, const Schedule& schedule, const Packing<T>& packing,
                 int64_t begin, int64_t end, int64_t width, int64_t cols, T* panels) {
  for (size_t i = 0; i < schedule.leaves.size(); i++) {
    const Leaf& leaf = schedule.leaves[i];
    for (int64_t p = begin; p < end; p++)
      pack_columns(columns.at(i, leaf).shift(p * width, 0), leaf.length,
                   std::min(width, cols - p * width), width,
                   panels + ((p - begin) * packing.length + packing.at[i]) * width);
  }
}

template <class T, class Out>
class Product {
 public:
  Product(const Schedule& schedule, Operand<T> a, Columns<T> b, Target<Out> target, int64_t rows,
          int64_t cols)
      : schedule_(schedule),
        packing_(schedule),
        a_(a),
        b_(b),
        target_(target),
        rows_(rows),
        cols_(cols) {
    segments_ = static_cast<int64_t>(schedule.segment_end.size());
    in_place_ = packing_.even;
    for (size_t i = 0; i < schedule.leaves.size(); i++) {
      const View<T> part = a_.at(i, schedule.leaves[i]);
      in_place_ =
          in_place_ && part.inner == 1 && (rows == 1 || part.outer >= schedule.leaves[i].length);
    }
    // A weight packed beforehand has full panels; others need no more columns than there are.
    width_ = b.packed ? panel_width : std::min(panel_width, (cols + 15) / 16 * 16);
    tile_rows_ = width_ <= Tiling<T>::narrow ? Tiling<T>::narrow_rows : Tiling<T>::rows;
    // Four or more whole segments of one leaf each, a count that is a power of two: quads are
    // subtrees.
    single_row_ = !paired<T> && rows == 1 && b.packed && !target.transposed && a_.leaves.empty() &&
                  in_place_ && segments_ % 4 == 0 && schedule.first == 0 &&
                  static_cast<int64_t>(schedule.leaves.size()) == segments_;
  }

  void run() {
    if (rows_ == 0 || cols_ == 0) return;
    const int64_t panels = (cols_ + width_ - 1) / width_;
    const int64_t tiles = (rows_ + tile_rows_ - 1) / tile_rows_;
    const int64_t threads = at::get_num_threads();
    const at::Tensor held = in_place_ ? at::Tensor() : pack_all_rows(tiles);
    const int64_t panel_bytes = std::max<int64_t>(packing_.length * width_ * sizeof(T), 1);
    // As many panels to a group as fit, and as many groups as share out evenly.
    const int64_t most = std::clamp<int64_t>(Tiling<T>::group_bytes / panel_bytes, 1, 16);
    const int64_t rounds = (panels + threads * most - 1) / (threads * most);
    const int64_t group = (panels + threads * rounds - 1) / (threads * rounds);
    const int64_t groups = (panels + group - 1) / group;
    // Few columns: split the rows too, so that every thread has work.
    const int64_t splits = std::clamp<int64_t>((threads + groups - 1) / groups, 1, tiles);
    at::parallel_for(0, groups * splits, 1, [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      for (int64_t task = begin; task < end; task++) {
        const int64_t g = task / splits, split = task % splits;
        run_group(g * group, std::min(panels, (g + 1) * group), tiles * split / splits,
                  tiles * (split + 1) / splits);
      }
      engine::brgemm_release(paired<T>);
    });
  }

 private:
  static constexpr int64_t tile_size_ = Tiling<T>::rows * panel_width;
  static constexpr int64_t stack_depth_ = 32;

  void run_group(int64_t panel_begin, int64_t panel_end, int64_t tile_begin, int64_t tile_end) {
    const int64_t panel_size = packing_.length * width_;
    const T* panels;
    if (b_.packed) {
      panels = b_.packed + panel_begin * panel_size;
    } else {
      T* room = reinterpret_cast<T*>(
          scratch((panel_end - panel_begin) * panel_size * sizeof(T) / 4 + 1, panels_room));
      pack_panels(b_.operand, schedule_, packing_, panel_begin, panel_end, width_, cols_, room);
      panels = room;
    }
    if (single_row_) return row_by_panels(panels, panel_begin, panel_end);
    float* stack = scratch(tile_size_ * (stack_depth_ + 1), stack_room);
    for (int64_t t = tile_begin; t < tile_end; t++) {
      const int64_t row = t * tile_rows_, count = std::min(tile_rows_, rows_ - row);
      for (int64_t p = panel_begin; p < panel_end; p++)
        tile(count, row, panels + (p - panel_begin) * panel_size, p, stack);
    }
  }

  // One row against packed fp32 panels, four segments at a time.
  void row_by_panels(const T* panels, int64_t panel_begin, int64_t panel_end) {
    if constexpr (!paired<T>) {
      const int64_t length = schedule_.leaves[0].length, quads = segments_ / 4;
      float* sums = scratch(4 * panel_width, stack_room);
      for (int64_t p = panel_begin; p < panel_end; p++) {
        const T* panel = panels + (p - panel_begin) * packing_.length * panel_width;
        for (int64_t q = 0; q < quads; q++)
          row_by_panel4(a_.whole.data + 4 * q * length, panel + 4 * q * length * panel_width,
                        length, sums + q * panel_width);
        float *a = sums, *b = quads > 1 ? a + panel_width : nullptr,
              *c = quads > 2 ? b + panel_width : nullptr,
              *d = quads > 2 ? c + panel_width : nullptr;
        write(a, b, c, d, 1, std::min(panel_width, cols_ - p * panel_width), 0, p * panel_width, 0,
              nullptr);
      }
    }
  }

  // Rows whose summed axis is not contiguous are copied once, for all panels, leaf after leaf: the
  // engine keeps the code it generates per stride, and a leaf's length takes few values where a
  // batch's takes any.
  at::Tensor pack_all_rows(int64_t tiles) {
    at::Tensor held = empty_tensor({rows_, packing_.length}, c10::CppTypeToScalarType<T>::value);
    T* room = held.template mutable_data_ptr<T>();
    at::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
      uint32_t* pairs =
          reinterpret_cast<uint32_t*>(scratch(long_segment * Tiling<T>::rows, pairs_room));
      for (int64_t t = begin; t < end; t++)
        for (size_t i = 0; i < schedule_.leaves.size(); i++) {
          const int64_t row = t * tile_rows_;
          const Leaf& leaf = schedule_.leaves[i];
          const int64_t stride = padded(leaf.length, room);
          pack_rows(a_.at(i, leaf).shift(row, 0), leaf.length, std::min(tile_rows_, rows_ - row),
                    room + packing_.at[i] * rows_ + row * stride, stride, pairs);
        }
    });
    held_rows_ = room;
    return held;
  }

  // One tile of the result: leaves by the engine, subtrees on a stack, the last merge fused with
  // the rounding.
  void tile(int64_t count, int64_t row, const T* panel, int64_t p, float* stack) {
    Node nodes[stack_depth_];
    int64_t top = 0, leaf = 0, pending = 1;
    for (int64_t s = 0; s < segments_; s++) {
      if (s == segments_ - 1) fetch_target(count, row, p);
      if (joins_left_sibling(s, leaf)) {
        add_leaf(row, count, panel, leaf++, stack + (top - 1) * tile_size_, true);
        nodes[top - 1] = {1, nodes[top - 1].index / 2};
      } else {
        float* sum = stack + top * tile_size_;
        if (s == 0 && schedule_.leaves[0].fold) take_target(count, row, p, sum);
        for (; leaf < schedule_.segment_end[s]; leaf++)
          add_leaf(row, count, panel, leaf, sum, schedule_.leaves[leaf].fold);
        nodes[top++] = {0, schedule_.first + s};
      }
      pending = settle(nodes, top, stack, count * width_, s == segments_ - 1);
    }
    emit(stack, nodes, top, pending, count, row, p);
  }

  // A share that begins inside a segment goes on from what the target holds.
  void take_target(int64_t count, int64_t row, int64_t p, float* sum) const {
    if constexpr (std::is_same_v<Out, float>) {
      const int64_t col = p * width_, cols = std::min(width_, cols_ - col);
      for (int64_t i = 0; i < count; i++) {
        std::copy_n(target_.data + (row + i) * target_.stride + col, cols, sum + i * width_);
        std::fill(sum + i * width_ + cols, sum + (i + 1) * width_, 0.0f);
      }
    }
  }

  // The fp32 engine adds a finished chain to what stands in the tile. For the right one of two
  // sibling segments that is their merge, and costs no pass of its own. (The bf16 engine continues
  // the chain, which is not.)
  bool joins_left_sibling(int64_t s, int64_t leaf) const {
    return !paired<T> && s > 0 && (schedule_.first + s) % 2 == 1 &&
           schedule_.segment_end[s] == leaf + 1 && schedule_.leaves[leaf].length > 0;
  }

  // The result's lines are far apart: asked for before the last segment, they are here after it.
  void fetch_target(int64_t count, int64_t row, int64_t p) const {
    const int64_t col = p * width_, cols = std::min(width_, cols_ - col);
    const Out* base = target_.data + (target_.transposed ? col * target_.stride + row
                                                         : row * target_.stride + col);
    const int64_t lines = target_.transposed ? cols : count,
                  length = target_.transposed ? count : cols;
    for (int64_t i = 0; i < lines; i++)
      for (int64_t j = 0; j < length; j += 64 / sizeof(Out))
        __builtin_prefetch(base + i * target_.stride + j, 1, 2);
  }

  void add_leaf(int64_t row, int64_t count, const T* panel, int64_t i, float* sum, bool onto) {
    const Leaf& leaf = schedule_.leaves[i];
    if (leaf.length == 0) {  // an absent sample is +0.0, and is added
      if (onto)
        add_absent(sum, count * width_);
      else
        std::fill(sum, sum + count * width_, 0.0f);
      return;
    }
    const int64_t length = padded(leaf.length, panel);
    const View<T> part =
        in_place_ ? a_.at(i, leaf) : View<T>{held_rows_ + packing_.at[i] * rows_, length, 1};
    const int64_t stride =
        rows_ == 1 ? std::max(part.outer, length) : part.outer;  // a lone row's says nothing
    const T* left = part.data + row * part.outer;
    const T* right = panel + packing_.at[i] * width_;
    if (count <= 16) {  // few rows: bound by memory, so fetch the next leaf meanwhile
      const char* next = reinterpret_cast<const char*>(right + length * width_);
      for (int64_t at = 0; at < length * width_ * static_cast<int64_t>(sizeof(T)); at += 64)
        __builtin_prefetch(next + at, 0, 3);
    }
    multiply_leaf(count, width_, length, left, stride, right, width_, sum, width_, onto);
  }

  // Merges what is complete, two levels at a time where the share holds all four. The merge that
  // would make the share's only root is left to `finish`; returns how many subtrees it has to take.
  int64_t settle(Node* nodes, int64_t& top, float* stack, int64_t n, bool last) const {
    const int64_t begin = schedule_.first, end = begin + segments_;
    while (top > 1) {
      const Node node = nodes[top - 1];
      if (node.index % 2 == 0) return 1;
      const int64_t quad = node.index / 4 * 4;
      // Where the engine may join two segments, pairs come first, and quads are of pairs.
      const bool whole = (paired<T> || node.level > 0) && (quad << node.level) >= begin &&
                         ((quad + 4) << node.level) <= end;
      if (whole && node.index % 4 == 1) return 1;
      const int64_t taken = whole ? 4 : 2;
      if (nodes[top - 2].level != node.level) return 1;  // its left sibling is another share's
      TORCH_INTERNAL_ASSERT(top >= taken);
      if (last && top == taken) return taken;
      float* left = stack + (top - taken) * tile_size_;
      if (whole)
        merge4(left, left + tile_size_, left + 2 * tile_size_, left + 3 * tile_size_, n);
      else
        merge2(left, left + tile_size_, n);
      top -= taken - 1;
      nodes[top - 1] =
          whole ? Node{node.level + 2, quad / 4} : Node{node.level + 1, node.index / 2};
    }
    return 1;
  }

  void emit(float* stack, Node* nodes, int64_t top, int64_t pending, int64_t count, int64_t row,
            int64_t p) {
    const int64_t col = p * width_, cols = std::min(width_, cols_ - col);
    if (pending == 1) {
      for (int64_t root = 0; root < top; root++) {
        float* sum = stack + root * tile_size_;
        write(sum, nullptr, nullptr, nullptr, count, cols, row, col, root, stack);
      }
      return;
    }
    float *a = stack, *b = a + tile_size_, *c = pending == 4 ? b + tile_size_ : nullptr,
          *d = pending == 4 ? c + tile_size_ : nullptr;
    if (target_.transposed) {
      if (pending == 4)
        merge4(a, b, c, d, count * width_);
      else
        merge2(a, b, count * width_);
      b = c = d = nullptr;
    }
    write(a, b, c, d, count, cols, row, col, 0, stack);
  }

  void write(float* a, float* b, float* c, float* d, int64_t count, int64_t cols, int64_t row,
             int64_t col, int64_t root, float* stack) {
    Out* base = target_.data + root * target_.root_stride;
    if (target_.transposed) {
      float* turned = stack + tile_size_ * stack_depth_;
      transpose32(words(a), width_, words(turned), count, count, cols);
      finish(turned, nullptr, nullptr, nullptr, count, target_.bias ? target_.bias + row : nullptr,
             cols, count, base + col * target_.stride + row, target_.stride);
    } else {
      finish(a, b, c, d, width_, target_.bias ? target_.bias + col : nullptr, count, cols,
             base + row * target_.stride + col, target_.stride);
    }
  }

  const Schedule& schedule_;
  Packing<T> packing_;
  Operand<T> a_;
  const T* held_rows_ = nullptr;
  Columns<T> b_;
  Target<Out> target_;
  int64_t rows_, cols_, segments_, width_, tile_rows_;
  bool in_place_, single_row_;
};

}  // namespace isobit
