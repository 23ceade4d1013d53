// What attention's forward and backward share: the mask, access to heads, and packed blocks.
#pragma once

#include "engine.h"
#include "rows.h"

namespace isobit {

// Part of the order: keys, and in the backward also queries, are cut into blocks of this many at
// absolute positions of their sample. Chunks of attention_chunk keys (order.h) are whole blocks.
constexpr int64_t attention_block = 64;
static_assert(attention_chunk % attention_block == 0);

struct Heads {
  int64_t query_heads, key_heads, depth;                     // depth: elements of one head
  int64_t group() const { return query_heads / key_heads; }  // query heads per key head
};

struct Mask {
  bool causal;
  int64_t window;      // keys up to its own that a query sees, and without `causal` as many from
                       // its own on; 0: no limit
  int64_t chunk_size;  // a query sees only keys of its chunk of so many positions; 0: no limit
};

// The keys [begin, end) that a query at `position` sees, in a sample with `keys` keys. Both grow
// with the position.
struct VisibleKeys {
  int64_t begin = 0, end;
  VisibleKeys(const Mask& mask, int64_t position, int64_t keys) : end(keys) {
    if (mask.causal)
      end = position + 1;
    else if (mask.window > 0)
      end = std::min(position + mask.window, keys);
    if (mask.window > 0) begin = std::max<int64_t>(position + 1 - mask.window, 0);
    if (mask.chunk_size > 0) begin = std::max(begin, position / mask.chunk_size * mask.chunk_size);
  }
};

// What a score is of the product of a query and a key: product · scale, and then, if `softcap` is
// not 0, softcap · tanh(score / softcap).
struct Scoring {
  float scale, softcap;
};

// Access to [rows, heads, depth] or [batch, rows, heads, depth], with rows numbered through the
// batch. The elements of one head are contiguous. Batch entries may be apart from each other, as in
// the caches of transformers, so that a cache is read without a copy. Not owned.
template <class T>
struct HeadRows {
  T* data;  // [batch][rows][heads][depth], strides below, depth contiguous
  int64_t row_stride, head_stride, batch_stride;
  int64_t rows;  // per batch entry

  // [depth]: one head of one row.
  T* at(int64_t row, int64_t head) const {
    return data + row / rows * batch_stride + row % rows * row_stride + head * head_stride;
  }
};

// `data` is the data pointer of t, with depth contiguous.
template <class T>
HeadRows<T> head_rows(const Tensor& t, T* data) {
  const int64_t batch_stride = t.dim() == 4 ? t.stride(0) : 0;
  return {data, t.stride(-3), t.stride(-2), batch_stride, std::max<int64_t>(t.size(-3), 1)};
}
template <class T>
HeadRows<const T> head_rows(const Tensor& t) {
  return head_rows(t, t.const_data_ptr<T>());
}

inline int64_t count_rows(const Tensor& t) {
  return t.dim() == 4 ? t.size(0) * t.size(1) : t.size(0);
}

// Packs a block of `count` rows as the right operand of a product that sums over the rows.
//   rows  [count][depth]
//   dst   [attention_block][depth], in pairs of rows for the paired engine; zero after `count`
template <class T>
void pack_block_summing_rows(RowMajor<const T> rows, int64_t count, int64_t depth, T* dst) {
  pack_columns(MatrixView<T>{rows.data, 1, rows.stride}, count, depth, depth, dst);
  const int64_t filled = padded_length(count, rows.data) * depth;
  std::fill(dst + filled, dst + attention_block * depth, T(0.0f));
}

// Packs a block of `count` rows as the right operand of a product that sums over the depth.
//   rows  [count][depth]
//   dst   [depth][attention_block], in pairs of depth for the paired engine; zero after `count`
template <class T>
void pack_block_summing_depth(RowMajor<const T> rows, int64_t count, int64_t depth, T* dst) {
  pack_columns(MatrixView<T>{rows.data, rows.stride, 1}, depth, count, attention_block, dst);
}

inline Tensor with_contiguous_depth(const Tensor& t, at::ScalarType dtype) {
  const Tensor converted = t.to(dtype);
  return converted.stride(-1) == 1 ? converted : converted.contiguous();
}

// spans [samples, 2]: the query rows (first, count) of each sample; blocks [samples, most blocks]:
// the row of k and v at which each block of keys begins; lengths [samples]: the keys of each
// sample.
void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
                     const Tensor& blocks, const Tensor& lengths);

}  // namespace isobit
