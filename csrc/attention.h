// Attention's problem, and what its forward and backward share: which keys a query sees, and the
// blocks' packed forms.
#pragma once

#include "linear.h"
#include "product.h"
#include "rows.h"

namespace isobit {

// Part of the order: keys, and in the backward queries, are cut at these absolute positions of
// their sample.
constexpr int64_t attention_block = 64;

struct Heads {
  int64_t queries, keys, depth;  // query heads, key heads, elements of one
  int64_t group() const { return queries / keys; }
};

struct Mask {
  bool causal;
  int64_t window;  // keys that a query sees, itself included; 0: all before it
};

// Keys [begin, end) that a query at `position` sees of a sample with `keys` of them.
struct Visible {
  int64_t begin, end;
  Visible(const Mask& mask, int64_t position, int64_t keys) {
    end = mask.causal ? position + 1 : keys;
    begin = mask.window > 0 ? std::max<int64_t>(end - mask.window, 0) : 0;
  }
};

// Rows of [rows, heads, depth] or [batch, rows, heads, depth], numbered through; the elements of
// one head are neighbours. A batch may lie apart from the next one, as in transformers' caches: so
// a cache is read where it is.
template <class T>
struct HeadRows {
  T* data;
  int64_t row, head, batch, rows;  // strides, and rows of one batch
  T* at(int64_t r, int64_t h) const { return data + r / rows * batch + r % rows * row + h * head; }
};

template <class T>
HeadRows<T> head_rows(const Tensor& t, T* data) {
  const int64_t batch = t.dim() == 4 ? t.stride(0) : 0;
  return {data, t.stride(-3), t.stride(-2), batch, std::max<int64_t>(t.size(-3), 1)};
}
template <class T>
HeadRows<const T> head_rows(const Tensor& t) {
  return head_rows(t, t.const_data_ptr<T>());
}

inline int64_t count_rows(const Tensor& t) {
  return t.dim() == 4 ? t.size(0) * t.size(1) : t.size(0);
}

// A block's rows as the summed axis of a product: [rows][depth], pairs of rows for the paired
// engine; the rest zero.
template <class T>
void pack_block_rows(const T* rows, int64_t stride, int64_t count, int64_t depth, T* out) {
  pack_columns(View<T>{rows, 1, stride}, count, depth, depth, out);
  const int64_t filled = padded(count, rows) * depth;
  std::fill(out + filled, out + attention_block * depth, T(0.0f));
}

// A block's rows as the columns of a product over the depth: [depth][rows], the rest zero.
template <class T>
void pack_block_columns(const T* rows, int64_t stride, int64_t count, int64_t depth, T* out) {
  pack_columns(View<T>{rows, stride, 1}, depth, count, attention_block, out);
}

inline Tensor with_neighbours(const Tensor& t, at::ScalarType type) {
  const Tensor made = t.to(type);
  return made.stride(-1) == 1 ? made : made.contiguous();
}

// isobit.attention says this better, and first; here it guards memory against direct calls of the
// operators.
inline void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
                            const Tensor& blocks, const Tensor& lengths) {
  auto is_table = [](const Tensor& t, int64_t dims) {
    return t.dim() == dims && t.scalar_type() == at::kLong && t.is_contiguous();
  };
  auto has_rows = [](const Tensor& t) { return t.dim() == 3 || t.dim() == 4; };
  bool good = has_rows(q) && has_rows(k) && v.sizes() == k.sizes() && k.size(-1) == q.size(-1) &&
              k.size(-2) > 0 && q.size(-2) % k.size(-2) == 0 && q.size(-1) > 0 &&
              q.size(-1) % lane_count == 0 && is_table(spans, 2) && spans.size(1) == 2 &&
              is_table(blocks, 2) && is_table(lengths, 1) && blocks.size(0) == spans.size(0) &&
              lengths.size(0) == spans.size(0) && k.scalar_type() == q.scalar_type() &&
              v.scalar_type() == q.scalar_type();
  for (int64_t s = 0; good && s < spans.size(0); s++) {
    const int64_t *span = spans.const_data_ptr<int64_t>() + 2 * s,
                  keys = lengths.const_data_ptr<int64_t>()[s];
    good = span[0] >= 0 && span[1] >= 0 && span[0] + span[1] <= count_rows(q) && keys >= span[1] &&
           (keys + attention_block - 1) / attention_block <= blocks.size(1);
    for (int64_t b = 0; good && b * attention_block < keys; b++) {
      const int64_t start = blocks.const_data_ptr<int64_t>()[s * blocks.size(1) + b],
                    inside = std::max<int64_t>(k.size(-3), 1);
      const int64_t last = start + std::min(attention_block, keys - b * attention_block) - 1;
      good = start >= 0 && last < count_rows(k) &&
             start / inside == last / inside;  // a block is evenly spaced
    }
  }
  TORCH_CHECK(good,
              "isobit: expected q [rows, heads, depth], k and v [rows, key heads, depth], and "
              "samples inside them; "
              "remedy: call isobit.attention, which says what is wrong");
}

// Hands out parts of one allocation.
class Carved {
 public:
  Carved(Scratch& scratch, int64_t floats) : at_(scratch.floats(floats)) {}
  template <class T = float>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += (count * sizeof(T) + 63) / 64 * 16;
    return taken;
  }

 private:
  float* at_;
};

}  // namespace isobit
