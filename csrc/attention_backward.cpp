// Attention backward: dQ folds blocks of keys left; dK and dV fold blocks of queries left.
//
// The query heads of a group are folded in ascending order. The weights are computed again from the
// scores and the forward's log-sum-exp, block by block, with keys as rows and queries as columns,
// so that sums over queries run along contiguous memory. Memory use is linear in the sequence
// length.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attention.h"
#include "attestation.h"
#include "elementary.h"

namespace isobit {

namespace {

constexpr int64_t square = attention_block * attention_block;

// A block of keys (rows) against a block of queries (columns).
template <class T>
struct BlockPair {
  const float* scores;        // [attention_block][attention_block]: k · q
  const float* weight_grads;  // [attention_block][attention_block]: v · grad
  const float* lse;           // [attention_block], per query: log-sum-exp of the forward
  const float* dots;          // [attention_block], per query: grad · output
  const float* begin;         // [attention_block], per query: the first key of the block it sees
  const float* end;           // [attention_block], per query: the key after the last
  T* weights;                 // [attention_block][attention_block], written
  T* score_grads;             // [attention_block][attention_block], written
};

// weights = exp(score − lse) and score_grads = weight · (weight_grad − dot) · slope · scale, where
// the slope is that of a soft cap; +0 where the query does not see the key.
template <bool capped, class T>
ISOBIT_INLINE void weigh_block(const BlockPair<T> pair, const Scoring scoring) {
  const auto [scores, weight_grads, lse, dots, begin, end, weights, score_grads] = pair;
  for (int64_t key = 0; key < attention_block; key++)
    for (int64_t i = 0; i < attention_block; i += lane_count) {
      const int64_t at = key * attention_block + i;
      const auto& first = *reinterpret_cast<const Floats*>(begin + i);
      const auto& last = *reinterpret_cast<const Floats*>(end + i);
      const Floats position = Floats{} + static_cast<float>(key);
      const Uint32s seen = reinterpret_cast<Uint32s>((position >= first) & (position < last));
      Floats score = *reinterpret_cast<const Floats*>(scores + at) * scoring.scale, bent;
      if constexpr (capped) {
        tanh(score / scoring.softcap, bent);
        score = bent * scoring.softcap;
      }
      Floats weight = score - *reinterpret_cast<const Floats*>(lse + i);
      exp_nonpositive(weight);
      weight = seen ? weight : Floats{};
      const Floats centred = *reinterpret_cast<const Floats*>(weight_grads + at) -
                             *reinterpret_cast<const Floats*>(dots + i);
      Floats grad = weight * centred;
      if constexpr (capped) grad = grad * (1.0f - bent * bent);
      grad = grad * scoring.scale;
      round_to(weight, weights + at);
      round_to(seen ? grad : Floats{}, score_grads + at);
    }
}

// Rounds sums [depth] to out [depth]. Adding 0 makes every zero +0.
template <class T>
ISOBIT_INLINE void round_row(const float* sums, int64_t depth, T* out) {
  for (int64_t d = 0; d < depth; d += lane_count)
    round_to(*reinterpret_cast<const Floats*>(sums + d) + 0.0f, out + d);
}

// dot: grad · out, both [depth], in the order of a feature axis of that length.
#define ISOBIT_ATTENTION_BACKWARD(T)                                                \
  ISOBIT_CLONES void weigh(const BlockPair<T> pair, const Scoring scoring) {        \
    weigh_block<false>(pair, scoring);                                              \
  }                                                                                 \
  ISOBIT_CLONES void weigh_capped(const BlockPair<T> pair, const Scoring scoring) { \
    weigh_block<true>(pair, scoring);                                               \
  }                                                                                 \
  ISOBIT_CLONES float dot(const Schedule& schedule, const T* grad, const T* out) {  \
    return sum_row(schedule, ProductTerms<T>{grad, out});                           \
  }                                                                                 \
  ISOBIT_CLONES void round_grads(const float* sums, int64_t depth, T* out) {        \
    round_row(sums, depth, out);                                                    \
  }
ISOBIT_ATTENTION_BACKWARD(float)
ISOBIT_ATTENTION_BACKWARD(BFloat16)

// dst[c][r] = src[r][c]; both are [attention_block][attention_block].
inline void transpose_block(const float* src, float* dst) {
  transpose_words(as_words(src), attention_block, as_words(dst), attention_block, attention_block,
                  attention_block);
}
inline void transpose_block(const BFloat16* src, BFloat16* dst) {
  for (int64_t r = 0; r < attention_block; r++)
    for (int64_t c = 0; c < attention_block; c++)
      dst[c * attention_block + r] = src[r * attention_block + c];
}

template <class T>
struct BackwardInputs {
  HeadRows<const T> q, k, v, grad, out;
  const float* lse;  // [rows][query heads]
};

template <class T>
struct BackwardOutputs {
  HeadRows<T> q_grad, k_grad, v_grad;
};

// The backward of one sample of `keys` rows and one key head.
template <class T>
class AttentionBackward {
 public:
  AttentionBackward(const Heads& heads, const Mask& mask, const Scoring& scoring, Scratch& scratch,
                    int64_t keys)
      : heads_(heads),
        mask_(mask),
        scoring_(scoring),
        count_(keys),
        blocks_((keys + attention_block - 1) / attention_block),
        depth_schedule_(feature_schedule(heads.depth)),
        memory_(scratch,
                (5 * blocks_ + 6) * attention_block * (heads.depth + 16) + 8 * square + 4096) {
    const int64_t block = attention_block * heads.depth, all = blocks_ * block;
    keys_ = memory_.template allocate<T>(all);
    packed_keys_ = memory_.template allocate<T>(all);
    values_ = memory_.template allocate<T>(all);
    key_grads_ = memory_.allocate(all);
    value_grads_ = memory_.allocate(all);
    queries_by_depth_ = memory_.template allocate<T>(block);
    queries_by_row_ = memory_.template allocate<T>(block);
    grads_by_depth_ = memory_.template allocate<T>(block);
    grads_by_row_ = memory_.template allocate<T>(block);
    query_grads_ = memory_.allocate(block);
    scores_ = memory_.allocate(square);
    weight_grads_ = memory_.allocate(square);
    weights_ = memory_.template allocate<T>(square);
    score_grads_ = memory_.template allocate<T>(square);
    score_grads_transposed_ = memory_.template allocate<T>(square);
    lse_ = memory_.allocate(attention_block);
    dots_ = memory_.allocate(attention_block);
    begin_ = memory_.allocate(attention_block);
    end_ = memory_.allocate(attention_block);
    std::fill(key_grads_, key_grads_ + all, 0.0f);
    std::fill(value_grads_, value_grads_ + all, 0.0f);
  }

  // The sample begins at row `row`; `head` is the key head.
  void run(const BackwardInputs<T>& in, const BackwardOutputs<T>& out, int64_t row, int64_t head) {
    const int64_t depth = heads_.depth;
    for (int64_t b = 0; b < blocks_; b++) {
      const int64_t first = row + b * attention_block, count = rows_of_block(b);
      const int64_t offset = b * attention_block * depth;
      const RowMajor<const T> k{in.k.at(first, head), in.k.row_stride};  // [count][depth]
      const RowMajor<const T> v{in.v.at(first, head), in.v.row_stride};  // [count][depth]
      pack_block_summing_rows<T>(k, count, depth, packed_keys_ + offset);
      copy_rows(k, count, keys_ + offset);
      copy_rows(v, count, values_ + offset);
    }
    for (int64_t h = head * heads_.group(); h < (head + 1) * heads_.group(); h++)
      for (int64_t b = 0; b < blocks_; b++) fold_queries(in, out, row, h, b);
    for (int64_t r = 0; r < count_; r++) {
      round_grads(key_grads_ + r * depth, depth, out.k_grad.at(row + r, head));
      round_grads(value_grads_ + r * depth, depth, out.v_grad.at(row + r, head));
    }
  }

 private:
  int64_t rows_of_block(int64_t b) const {
    return std::min(attention_block, count_ - b * attention_block);
  }

  // Copies rows [count][depth] to dst [attention_block][depth], zero after `count`.
  void copy_rows(RowMajor<const T> rows, int64_t count, T* dst) const {
    const int64_t depth = heads_.depth;
    for (int64_t r = 0; r < count; r++) std::copy_n(rows.row(r), depth, dst + r * depth);
    std::fill(dst + count * depth, dst + attention_block * depth, T(0.0f));
  }

  // One block of queries of query head `head`, against all blocks of keys.
  void fold_queries(const BackwardInputs<T>& in, const BackwardOutputs<T>& out, int64_t row,
                    int64_t head, int64_t block) {
    const int64_t depth = heads_.depth, start = block * attention_block;
    const int64_t count = rows_of_block(block);
    const RowMajor<const T> q{in.q.at(row + start, head), in.q.row_stride};  // [count][depth]
    const RowMajor<const T> grad{in.grad.at(row + start, head), in.grad.row_stride};  // as q
    pack_block_summing_depth<T>(q, count, depth, queries_by_depth_);
    pack_block_summing_rows<T>(q, count, depth, queries_by_row_);
    pack_block_summing_depth<T>(grad, count, depth, grads_by_depth_);
    pack_block_summing_rows<T>(grad, count, depth, grads_by_row_);
    for (int64_t r = 0; r < attention_block; r++) {
      const bool inside = r < count;
      lse_[r] = inside ? in.lse[(row + start + r) * heads_.query_heads + head] : infinity;
      dots_[r] =
          inside ? dot(depth_schedule_, grad.row(r), in.out.at(row + start + r, head)) : 0.0f;
    }
    std::fill(query_grads_, query_grads_ + attention_block * depth, 0.0f);
    const VisibleKeys first(mask_, start, count_), last(mask_, start + count - 1, count_);
    for (int64_t b = first.begin / attention_block; b * attention_block < last.end; b++)
      fold_block_pair(start, count, b);
    for (int64_t r = 0; r < count; r++)
      round_grads(query_grads_ + r * depth, depth, out.q_grad.at(row + start + r, head));
  }

  // The block of `count` queries from position `start` on, against block b of the keys.
  void fold_block_pair(int64_t start, int64_t count, int64_t b) {
    const int64_t depth = heads_.depth, offset = b * attention_block * depth, n = attention_block;
    for (int64_t r = 0; r < n; r++) {
      const VisibleKeys keys(mask_, start + r, count_);
      begin_[r] = keys.begin - b * n;
      end_[r] = r < count ? std::min(keys.end, count_) - b * n : 0;
    }
    multiply_leaf<T>({n, n, depth}, {keys_ + offset, depth}, {queries_by_depth_, n}, {scores_, n},
                     false);
    multiply_leaf<T>({n, n, depth}, {values_ + offset, depth}, {grads_by_depth_, n},
                     {weight_grads_, n}, false);
    const BlockPair<T> pair{scores_, weight_grads_, lse_,     dots_,
                            begin_,  end_,          weights_, score_grads_};
    if (scoring_.softcap > 0)
      weigh_capped(pair, scoring_);
    else
      weigh(pair, scoring_);
    multiply_leaf<T>({n, depth, n}, {weights_, n}, {grads_by_row_, depth},
                     {value_grads_ + offset, depth}, true);
    multiply_leaf<T>({n, depth, n}, {score_grads_, n}, {queries_by_row_, depth},
                     {key_grads_ + offset, depth}, true);
    transpose_block(score_grads_, score_grads_transposed_);
    multiply_leaf<T>({n, depth, n}, {score_grads_transposed_, n}, {packed_keys_ + offset, depth},
                     {query_grads_, depth}, true);
  }

  Heads heads_;
  Mask mask_;
  Scoring scoring_;
  int64_t count_, blocks_;  // keys of the sample, and their blocks
  Schedule depth_schedule_;
  BumpAllocator memory_;
  // All below are in memory_, and B is attention_block. `packed` is the format of a right operand
  // (see packing.h).
  T* keys_;                    // [blocks][B][depth]
  T* packed_keys_;             // [blocks][B][depth], packed, summing over keys
  T* values_;                  // [blocks][B][depth]
  float* key_grads_;           // [blocks][B][depth]: dK so far
  float* value_grads_;         // [blocks][B][depth]: dV so far
  T* queries_by_depth_;        // [depth][B], packed, summing over depth: the current block
  T* queries_by_row_;          // [B][depth], packed, summing over queries
  T* grads_by_depth_;          // [depth][B], packed, summing over depth
  T* grads_by_row_;            // [B][depth], packed, summing over queries
  float* query_grads_;         // [B][depth]: dQ of the current block so far
  float* scores_;              // [B keys][B queries]
  float* weight_grads_;        // [B keys][B queries]
  T* weights_;                 // [B keys][B queries]
  T* score_grads_;             // [B keys][B queries]
  T* score_grads_transposed_;  // [B queries][B keys]
  float* lse_;                 // [B], per query
  float* dots_;                // [B], per query
  float* begin_;               // [B], per query: visible keys of the block, as floats
  float* end_;                 // [B], per query
};

template <class T>
void run_backward(const BackwardInputs<T>& in, const BackwardOutputs<T>& out, const Tensor& spans,
                  const Heads& heads, const Mask& mask, const Scoring& scoring) {
  at::parallel_for(0, spans.size(0) * heads.key_heads, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    FixedFpEnvironment fp_environment;
    for (int64_t task = begin; task < end; task++) {
      const int64_t* span =  // [2]: first row, rows
          spans.const_data_ptr<int64_t>() + task / heads.key_heads * 2;
      if (span[1] == 0) continue;
      AttentionBackward<T>(heads, mask, scoring, scratch, span[1])
          .run(in, out, span[0], task % heads.key_heads);
    }
    engine::brgemm_release(paired<T>);
  });
}

std::tuple<Tensor, Tensor, Tensor> attention_backward_op(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const Tensor& spans, const Tensor& blocks, const Tensor& lengths,
    double scale, bool causal, int64_t window, double softcap, int64_t chunk_size) {
  check_engine();
  check_attention(q, k, v, spans, blocks, lengths);
  const at::ScalarType dtype = engine_dtype(q.scalar_type());
  const Tensor query = with_contiguous_depth(q, dtype), key = with_contiguous_depth(k, dtype),
               value = with_contiguous_depth(v, dtype),
               out_grad = with_contiguous_depth(grad, dtype),
               output = with_contiguous_depth(out, dtype);
  ISOBIT_CHECK(grad.sizes() == q.sizes() && out.sizes() == q.sizes() && lse.is_contiguous() &&
                   lse.numel() * q.size(-1) == q.numel(),
               "attention",
               c10::str("a gradient and an output ", q.sizes(), ", as q, and a contiguous lse ",
                        q.sizes().slice(0, q.dim() - 1)),
               c10::str(describe(grad), ", ", describe(out), " and lse ", describe(lse)),
               "call isobit.attention, and let autograd call this");
  Tensor q_grad = empty_tensor(q.sizes(), dtype).zero_(),
         k_grad = empty_tensor(k.sizes(), dtype).zero_(),
         v_grad = empty_tensor(v.sizes(), dtype).zero_();
  const Heads heads{q.size(-2), k.size(-2), q.size(-1)};
  dispatch_engine_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const BackwardInputs<T> inputs{head_rows<T>(query),  head_rows<T>(key),
                                   head_rows<T>(value),  head_rows<T>(out_grad),
                                   head_rows<T>(output), lse.const_data_ptr<float>()};
    const BackwardOutputs<T> outputs{head_rows(q_grad, q_grad.mutable_data_ptr<T>()),
                                     head_rows(k_grad, k_grad.mutable_data_ptr<T>()),
                                     head_rows(v_grad, v_grad.mutable_data_ptr<T>())};
    run_backward(inputs, outputs, spans, heads, {causal, window, chunk_size},
                 {static_cast<float>(scale), static_cast<float>(softcap)});
  });
  const at::ScalarType result = q.scalar_type();
  return {round_tensor("attention", q_grad, result), round_tensor("attention", k_grad, result),
          round_tensor("attention", v_grad, result)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor spans, Tensor blocks, Tensor lengths, float scale, bool causal, int window, "
      "float softcap=0.0, int chunk_size=0) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("attention_backward", &attention_backward_op); }

}  // namespace isobit
