// Attention forward: every query folds blocks of 64 keys, cut at absolute positions of its sample,
// by the online softmax.
//
// Prefill, chunked prefill and decode are the same fold. A block that a query does not see leaves
// its sums as they are: the factor is exp(0) = 1 and what is added is +0, so tiles of queries may
// visit more blocks than one of them sees.
#include "attention.h"

#include <torch/library.h>

#include "attested.h"
#include "exponential.h"
#include "logarithm.h"

namespace isobit {

namespace {

constexpr int64_t tile_rows = 64, split_rows = 512;  // free

// What a row has folded so far.
struct Folded {
  float *max, *sum, *output;
};

// Scores scaled and masked in place; each row's maximum with what came before goes to `next`.
ISOBIT_CLONES void mask_scores(float* scores, int64_t rows, float scale, const int64_t* begin,
                               const int64_t* end, const float* max, float* next) {
  const Lanes index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t r = 0; r < rows; r++) {
    Floats most = Floats{} - infinity;
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      Floats& at = *reinterpret_cast<Floats*>(scores + r * attention_block + i);
      const Lanes place = index + static_cast<uint32_t>(i);
      const Floats scaled = at * scale;
      const Lanes seen =
          (place >= static_cast<uint32_t>(begin[r])) & (place < static_cast<uint32_t>(end[r]));
      at = seen ? scaled : Floats{} - infinity;
      most = at > most ? at : most;
    }
    float found = max[r];
    for (int64_t i = 0; i < lane_count; i++) found = most[i] > found ? most[i] : found;
    next[r] = found;
  }
}

// exp(score - max) to `weights`, their sum onto the row's, and the factor of what was folded before
// to `factor`.
template <class T>
ISOBIT_INLINE void weigh_rows(const float* scores, int64_t rows, const float* next, float* max,
                              float* sum, float* factor, T* weights) {
  for (int64_t r = 0; r < rows; r += lane_count) {
    Floats before, after;
    widen_some(max + r, std::min(lane_count, rows - r), 0.0f, before);
    widen_some(next + r, std::min(lane_count, rows - r), 0.0f, after);
    before = before - (after == -infinity ? Floats{} : after);
    exp_nonpositive(before);
    round_some(before, std::min(lane_count, rows - r), factor + r);
  }
  for (int64_t r = 0; r < rows; r++) {
    const float most = next[r] == -infinity ? 0.0f : next[r];
    Floats lanes{};
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      Floats term = *reinterpret_cast<const Floats*>(scores + r * attention_block + i) - most;
      exp_nonpositive(term);
      lanes = lanes + term;
      round_to(term, weights + r * attention_block + i);
    }
    sum[r] = sum[r] * factor[r] + merge_lanes(lanes);
    max[r] = next[r];
  }
}

ISOBIT_CLONES void rescale(float* output, const float* factor, int64_t rows, int64_t depth) {
  for (int64_t r = 0; r < rows; r++)
    if (factor[r] != 1.0f)
      for (int64_t d = 0; d < depth; d++) output[r * depth + d] = output[r * depth + d] * factor[r];
}

// One zero: -0 may come or go with blocks that are not seen.
template <class T>
ISOBIT_INLINE void divide_row(const float* folded, float sum, int64_t depth, T* out) {
  for (int64_t d = 0; d < depth; d += lane_count) {
    const Floats value = (*reinterpret_cast<const Floats*>(folded + d) + 0.0f) / sum;
    round_to(sum == 0.0f ? Floats{} : value, out + d);
  }
}

#define ISOBIT_ATTENTION(T)                                                                  \
  ISOBIT_CLONES void weigh(const float* scores, int64_t rows, const float* next, float* max, \
                           float* sum, float* factor, T* weights) {                          \
    weigh_rows(scores, rows, next, max, sum, factor, weights);                               \
  }                                                                                          \
  ISOBIT_CLONES void divide(const float* folded, float sum, int64_t depth, T* out) {         \
    divide_row(folded, sum, depth, out);                                                     \
  }
ISOBIT_ATTENTION(float)
ISOBIT_ATTENTION(BFloat16)

ISOBIT_CLONES void log_sum_exp(const float* max, const float* sum, int64_t rows, float* out) {
  for (int64_t r = 0; r < rows; r += lane_count) {
    const int64_t count = std::min(lane_count, rows - r);
    Floats total, most;
    widen_some(sum + r, count, 1.0f, total);
    widen_some(max + r, count, 0.0f, most);
    const Floats seen = total;
    log_positive(total);
    round_some(seen == 0.0f ? Floats{} + infinity : most + total, count, out + r);
  }
}

bool is_finite(const float* v, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) most = std::max(most, words(v)[i] & 0x7fffffffu);
  return most < 0x7f800000u;
}
bool is_finite(const BFloat16* v, int64_t n) {
  uint16_t most = 0;
  for (int64_t i = 0; i < n; i++) most = std::max<uint16_t>(most, v[i].x & 0x7fff);
  return most < 0x7f80;
}

// One sample and one key head: its group's query rows [first, last), numbered position by position,
// head by head.
template <class T>
class Fold {
 public:
  Fold(const Heads& heads, const Mask& mask, float scale, Scratch& scratch, int64_t rows)
      : heads_(heads),
        mask_(mask),
        scale_(scale),
        rows_(rows),
        room_(scratch, (2 * attention_block + rows) * (heads.depth + 16) +
                           rows * (heads.depth + 64) + tile_rows * (2 * attention_block + 64) +
                           4096) {
    const int64_t depth = heads.depth;
    keys_ = room_.template take<T>(attention_block * depth);
    values_ = room_.template take<T>(attention_block * depth);
    queries_ = room_.template take<T>(rows * depth);
    folded_ = {room_.take(rows), room_.take(rows), room_.take(rows * depth)};
    scores_ = room_.take(tile_rows * attention_block);
    weights_ = room_.template take<T>(tile_rows * attention_block);
    next_ = room_.take(tile_rows);
    factor_ = room_.take(tile_rows);
    std::fill(folded_.max, folded_.max + rows, -infinity);
    std::fill(folded_.sum, folded_.sum + rows, 0.0f);
    std::fill(folded_.output, folded_.output + rows * depth, 0.0f);
  }

  T* query(int64_t row) { return queries_ + row * heads_.depth; }

  // `starts[j]` is the row at which block j of the sample's `keys` begins; query row `first + r`
  // stands at position `offset + (first + r) / group`.
  void run(HeadRows<const T> k, HeadRows<const T> v, int64_t head, const int64_t* starts,
           int64_t keys, int64_t first, int64_t offset) {
    first_ = first, offset_ = offset, count_ = keys;
    const int64_t begin = seen(0).begin, end = seen(rows_ - 1).end;
    for (int64_t block = begin / attention_block; block * attention_block < end; block++) {
      const int64_t count = std::min(attention_block, keys - block * attention_block);
      pack_block_columns(k.at(starts[block], head), k.row, count, heads_.depth, keys_);
      pack_block_rows(v.at(starts[block], head), v.row, count, heads_.depth, values_);
      for (int64_t row = 0; row < rows_; row += tile_rows)
        tile(block, row, std::min(tile_rows, rows_ - row));
    }
  }

  void finish(int64_t row, T* out) {
    divide(folded_.output + row * heads_.depth, folded_.sum[row], heads_.depth, out);
  }
  void finish_sums(float* out) { log_sum_exp(folded_.max, folded_.sum, rows_, out); }

 private:
  Visible seen(int64_t row) const {
    return {mask_, offset_ + (first_ + row) / heads_.group(), count_};
  }

  void tile(int64_t block, int64_t row, int64_t rows) {
    const int64_t depth = heads_.depth, start = block * attention_block;
    int64_t begin[tile_rows], end[tile_rows];
    bool any = false, all = true;
    for (int64_t r = 0; r < rows; r++) {
      const Visible keys = seen(row + r);
      begin[r] = std::clamp<int64_t>(keys.begin - start, 0, attention_block);
      end[r] = std::clamp<int64_t>(std::min(keys.end, count_) - start, 0, attention_block);
      any = any || begin[r] < end[r];
      all = all && begin[r] == 0 && end[r] == std::min(attention_block, count_ - start);
    }
    if (!any) return;
    multiply_leaf<T>(rows, attention_block, depth, queries_ + row * depth, depth, keys_,
                     attention_block, scores_, attention_block, false);
    mask_scores(scores_, rows, scale_, begin, end, folded_.max + row, next_);
    weigh(scores_, rows, next_, folded_.max + row, folded_.sum + row, factor_, weights_);
    float* output = folded_.output + row * depth;
    rescale(output, factor_, rows, depth);
    if (all || is_finite(values_, attention_block * depth))
      multiply_leaf<T>(rows, depth, attention_block, weights_, attention_block, values_, depth,
                       output, depth, true);
    else
      for (int64_t r = 0; r < rows; r++)
        add_seen(begin[r], end[r], weights_ + r * attention_block, output + r * depth);
  }

  // A value that is not finite must not reach rows that do not see it, since 0 · inf is NaN.
  void add_seen(int64_t begin, int64_t end, const T* weights, float* output) {
    std::vector<T> kept(values_, values_ + attention_block * heads_.depth);
    constexpr int64_t pair = paired<T> ? 2 : 1;
    for (int64_t key = 0; key < attention_block; key++)
      if (key < begin || key >= end)
        for (int64_t d = 0; d < heads_.depth; d++)
          kept[(key / pair * heads_.depth + d) * pair + key % pair] = T(0.0f);
    multiply_leaf<T>(1, heads_.depth, attention_block, weights, attention_block, kept.data(),
                     heads_.depth, output, heads_.depth, true);
  }

  Heads heads_;
  Mask mask_;
  float scale_;
  int64_t rows_, first_ = 0, offset_ = 0, count_ = 0;
  Carved room_;
  T *keys_, *values_, *queries_, *weights_;
  float *scores_, *next_, *factor_;
  Folded folded_;
};

// All samples: `spans` (first row, rows) of the queries, `blocks` the first row of each block of
// keys, `lengths` the keys.
template <class T>
void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
            const Tensor& blocks, const Tensor& lengths, float scale, Mask mask, Tensor& out,
            Tensor& sums) {
  const Heads heads{q.size(-2), k.size(-2), q.size(-1)};
  const auto from = head_rows<T>(q), keys = head_rows<T>(k), values = head_rows<T>(v);
  T* to = out.mutable_data_ptr<T>();
  float* lse = sums.mutable_data_ptr<float>();
  const int64_t group = heads.group(), tasks = spans.size(0) * heads.keys;
  // Rows are split too: so that what a task has folded stays in cache, and so that every thread has
  // work.
  int64_t longest = 0;
  for (int64_t s = 0; s < spans.size(0); s++)
    longest = std::max(longest, spans.const_data_ptr<int64_t>()[2 * s + 1] * group);
  const int64_t splits =
      std::max<int64_t>({(longest + split_rows - 1) / split_rows,
                         tasks ? (2 * at::get_num_threads() - 1) / tasks : 1, 1});
  at::parallel_for(0, tasks * splits, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    PlainArithmetic plain;
    std::vector<float> found;
    for (int64_t task = begin; task < end; task++) {
      const int64_t split = task % splits, head = task / splits % heads.keys,
                    sample = task / splits / heads.keys;
      const int64_t* span = spans.const_data_ptr<int64_t>() + 2 * sample;
      const int64_t count = lengths.const_data_ptr<int64_t>()[sample],
                    tiles = (span[1] * group + 63) / 64;
      const int64_t first = tiles * split / splits * 64,
                    last = std::min(tiles * (split + 1) / splits * 64, span[1] * group);
      if (first >= last) continue;
      Fold<T> fold(heads, mask, scale, scratch, last - first);
      auto place = [&](int64_t row) {
        return std::pair{span[0] + (first + row) / group, head * group + (first + row) % group};
      };
      for (int64_t row = 0; row < last - first; row++) {
        const auto [r, h] = place(row);
        std::copy_n(from.at(r, h), heads.depth, fold.query(row));
      }
      fold.run(keys, values, head, blocks.const_data_ptr<int64_t>() + sample * blocks.size(1),
               count, first, count - span[1]);
      found.resize(last - first);
      fold.finish_sums(found.data());
      for (int64_t row = 0; row < last - first; row++) {
        const auto [r, h] = place(row);
        fold.finish(row, to + (r * heads.queries + h) * heads.depth);
        lse[r * heads.queries + h] = found[row];
      }
    }
    engine::brgemm_release(paired<T>);
  });
}

std::tuple<Tensor, Tensor> attention_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& spans, const Tensor& blocks,
                                        const Tensor& lengths, double scale, bool causal,
                                        int64_t window) {
  check_engine();
  check_attention(q, k, v, spans, blocks, lengths);
  const at::ScalarType type = engine_type(q.scalar_type());
  Tensor out = empty_tensor(q.sizes(), type).zero_();
  Tensor sums = empty_tensor(q.sizes().slice(0, q.dim() - 1), at::kFloat).fill_(infinity);
  const Tensor from = with_neighbours(q, type), keys = with_neighbours(k, type),
               values = with_neighbours(v, type);
  const Mask mask{causal, window};
  if (type == at::kFloat)
    attend<float>(from, keys, values, spans, blocks, lengths, scale, mask, out, sums);
  else
    attend<BFloat16>(from, keys, values, spans, blocks, lengths, scale, mask, out, sums);
  return {round_all(out, q.scalar_type()), sums};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor spans, Tensor blocks, Tensor lengths, float "
      "scale, bool causal, "
      "int window) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("attention", &attention_op); }

}  // namespace isobit
