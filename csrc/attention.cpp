// Attention forward: each query folds blocks of 64 keys from left to right by the online softmax.
// The fold starts anew at every chunk of 2048 keys, and the chunks are merged from left to right.
//
// Blocks and chunks are cut at absolute positions of the sample, so prefill, chunked prefill and
// decode are the same fold, and a decoding step may compute chunks apart from each other. A block
// that a query does not see leaves its sums unchanged: the factor is exp(0) = 1, and the added
// terms are +0. A tile of queries may therefore visit more blocks, or chunks, than one of its
// queries sees.
#include "attention.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "online_softmax.h"

namespace isobit {

namespace {

constexpr int64_t tile_rows = 64, split_rows = 512;  // tile sizes, not part of the order

// The keys and values of one sample and one key head. Not owned.
template <class T>
struct SampleKeys {
  HeadRows<const T> k, v;
  int64_t head;
  const int64_t* block_starts;  // [blocks]: the row of k and v at which each block begins
  int64_t count;                // keys of the sample
};

// The forward of one sample and one key head, for `rows` rows of its group of query heads. Rows are
// numbered position by position, head by head: row r has position r / group and head r % group.
template <class T>
class AttentionForward {
 public:
  AttentionForward(const Heads& heads, const Mask& mask, const Scoring& scoring, Scratch& scratch,
                   int64_t rows)
      : heads_(heads),
        mask_(mask),
        scoring_(scoring),
        rows_(rows),
        memory_(scratch, (2 * attention_block + rows) * (heads.depth + 16) +
                             2 * rows * (heads.depth + 64) +
                             tile_rows * (2 * attention_block + 64) + 4096) {
    const int64_t depth = heads.depth;
    keys_ = memory_.template allocate<T>(attention_block * depth);
    values_ = memory_.template allocate<T>(attention_block * depth);
    queries_ = memory_.template allocate<T>(rows * depth);
    running_ = {memory_.allocate(rows), memory_.allocate(rows), memory_.allocate(rows * depth)};
    earlier_ = {memory_.allocate(rows), memory_.allocate(rows), memory_.allocate(rows * depth)};
    scores_ = memory_.allocate(tile_rows * attention_block);
    weights_ = memory_.template allocate<T>(tile_rows * attention_block);
    new_max_ = memory_.allocate(tile_rows);
    factor_ = memory_.allocate(tile_rows);
    running_.clear(rows, depth);
  }

  // [depth]: where the caller writes the query of a row, before run().
  T* query(int64_t row) { return queries_ + row * heads_.depth; }

  // Row r of this object is row first_row + r of the sample's queries, whose first position is
  // `offset`.
  void run(const SampleKeys<T>& keys, int64_t first_row, int64_t offset) {
    first_row_ = first_row;
    offset_ = offset;
    key_count_ = keys.count;
    const int64_t begin = visible_keys(0).begin, end = visible_keys(rows_ - 1).end;
    const int64_t first = begin / attention_block;
    int64_t chunks = 0;  // in earlier_
    for (int64_t block = first; block * attention_block < end; block++) {
      if (block > first && block * attention_block % attention_chunk == 0) end_chunk(chunks++);
      const int64_t count = std::min(attention_block, key_count_ - block * attention_block);
      const int64_t start = keys.block_starts[block];
      pack_block_summing_depth<T>({keys.k.at(start, keys.head), keys.k.row_stride}, count,
                                  heads_.depth, keys_);
      pack_block_summing_rows<T>({keys.v.at(start, keys.head), keys.v.row_stride}, count,
                                 heads_.depth, values_);
      for (int64_t row = 0; row < rows_; row += tile_rows)
        fold_block(block, row, std::min(tile_rows, rows_ - row));
    }
    if (chunks > 0) {
      merge_chunk(earlier_, running_, rows_, heads_.depth);
      std::swap(earlier_, running_);
    }
  }

  // The output of a row, to out [depth].
  void write_output(int64_t row, T* out) {
    divide(running_.output + row * heads_.depth, running_.sum[row], heads_.depth, out);
  }
  // The log-sum-exp of all rows, to out [rows].
  void write_log_sum_exp(float* out) { log_sum_exp(running_.max, running_.sum, rows_, out); }

 private:
  VisibleKeys visible_keys(int64_t row) const {
    return {mask_, offset_ + (first_row_ + row) / heads_.group(), key_count_};
  }

  // Moves the state of the chunk that ends to earlier_, which holds `chunks` chunks.
  void end_chunk(int64_t chunks) {
    if (chunks == 0)
      std::swap(earlier_, running_);
    else
      merge_chunk(earlier_, running_, rows_, heads_.depth);
    running_.clear(rows_, heads_.depth);
  }

  // Folds one block of keys into rows [row, row + rows).
  void fold_block(int64_t block, int64_t row, int64_t rows) {
    const int64_t depth = heads_.depth, start = block * attention_block;
    int64_t begin[tile_rows], end[tile_rows];  // per row: the keys of this block that it sees
    bool any = false, all = true;
    for (int64_t r = 0; r < rows; r++) {
      const VisibleKeys keys = visible_keys(row + r);
      begin[r] = std::clamp<int64_t>(keys.begin - start, 0, attention_block);
      end[r] = std::clamp<int64_t>(std::min(keys.end, key_count_) - start, 0, attention_block);
      any = any || begin[r] < end[r];
      all = all && begin[r] == 0 && end[r] == std::min(attention_block, key_count_ - start);
    }
    if (!any) return;
    float *max = running_.max + row, *sum = running_.sum + row;  // [rows]
    float* output = running_.output + row * depth;               // [rows][depth]
    multiply_leaf<T>({rows, attention_block, depth}, {queries_ + row * depth, depth},
                     {keys_, attention_block}, {scores_, attention_block}, false);
    if (scoring_.softcap > 0) cap_scores(scores_, rows * attention_block, scoring_);
    mask_scores(scores_, rows, scoring_.softcap > 0 ? 1.0f : scoring_.scale, begin, end, max,
                new_max_);
    weigh(ScoreBlock<T>{scores_, new_max_, max, sum, factor_, weights_}, rows);
    rescale(output, factor_, rows, depth);
    if (all || is_finite(values_, attention_block * depth))
      multiply_leaf<T>({rows, depth, attention_block}, {weights_, attention_block},
                       {values_, depth}, {output, depth}, true);
    else
      for (int64_t r = 0; r < rows; r++)
        add_seen_values(begin[r], end[r], weights_ + r * attention_block, output + r * depth);
  }

  // A value that is not finite must not reach rows that do not see it, because 0 · inf is NaN.
  //   weights  [attention_block]
  //   output   [depth]
  void add_seen_values(int64_t begin, int64_t end, const T* weights, float* output) {
    const int64_t depth = heads_.depth;
    std::vector<T> seen(values_, values_ + attention_block * depth);
    constexpr int64_t pair = paired<T> ? 2 : 1;
    for (int64_t key = 0; key < attention_block; key++)
      if (key < begin || key >= end)
        for (int64_t d = 0; d < depth; d++)
          seen[(key / pair * depth + d) * pair + key % pair] = T(0.0f);
    multiply_leaf<T>({1, depth, attention_block}, {weights, attention_block}, {seen.data(), depth},
                     {output, depth}, true);
  }

  Heads heads_;
  Mask mask_;
  Scoring scoring_;
  int64_t rows_, first_row_ = 0, offset_ = 0, key_count_ = 0;
  BumpAllocator memory_;
  // All below are in memory_. `packed` is the format of a right operand (see packing.h).
  T* keys_;                 // [depth][attention_block], packed: the current block
  T* values_;               // [attention_block][depth], packed: the current block
  T* queries_;              // [rows][depth]
  RunningSoftmax running_;  // of all rows: the current chunk; after run(), the whole
  RunningSoftmax earlier_;  // of all rows: the chunks before it, if there are any
  float* scores_;           // [tile_rows][attention_block]
  T* weights_;              // [tile_rows][attention_block]
  float* new_max_;          // [tile_rows]
  float* factor_;           // [tile_rows]
};

struct AttentionInputs {
  const Tensor &q, &k, &v;                 // of the engine's dtype, with contiguous depth
  const Tensor &spans, &blocks, &lengths;  // see check_attention
  Heads heads;
  Mask mask;
  Scoring scoring;
};

// Query rows of one sample and one key head.
struct ForwardTask {
  int64_t sample, head;
  int64_t first_row, end_row;
};

// `out` is that of q, contiguous [rows, heads, depth]; `lse` is [rows][heads].
template <class T>
void run_task(const AttentionInputs& in, const ForwardTask& task, Scratch& scratch, T* out,
              float* lse) {
  const Heads& heads = in.heads;
  const int64_t group = heads.group(), rows = task.end_row - task.first_row;
  const int64_t* span = in.spans.const_data_ptr<int64_t>() + 2 * task.sample;  // [2]
  const int64_t key_count = in.lengths.const_data_ptr<int64_t>()[task.sample];
  const int64_t* block_starts =  // [blocks]
      in.blocks.const_data_ptr<int64_t>() + task.sample * in.blocks.size(1);
  const HeadRows<const T> queries = head_rows<T>(in.q);
  AttentionForward<T> forward(heads, in.mask, in.scoring, scratch, rows);
  auto locate = [&](int64_t row) {  // the row of q and the query head
    const int64_t r = task.first_row + row;
    return std::pair{span[0] + r / group, task.head * group + r % group};
  };
  for (int64_t row = 0; row < rows; row++) {
    const auto [r, h] = locate(row);
    std::copy_n(queries.at(r, h), heads.depth, forward.query(row));
  }
  forward.run({head_rows<T>(in.k), head_rows<T>(in.v), task.head, block_starts, key_count},
              task.first_row, key_count - span[1]);
  std::vector<float> row_lse(rows);
  forward.write_log_sum_exp(row_lse.data());
  for (int64_t row = 0; row < rows; row++) {
    const auto [r, h] = locate(row);
    forward.write_output(row, out + (r * heads.query_heads + h) * heads.depth);
    lse[r * heads.query_heads + h] = row_lse[row];
  }
}

template <class T>
void attend(const AttentionInputs& in, Tensor& out, Tensor& lse) {
  const int64_t* spans = in.spans.const_data_ptr<int64_t>();  // [samples][2]
  const int64_t samples = in.spans.size(0), group = in.heads.group();
  const int64_t key_heads = in.heads.key_heads, pairs = samples * key_heads;
  T* out_data = out.mutable_data_ptr<T>();          // [rows][heads][depth]
  float* lse_data = lse.mutable_data_ptr<float>();  // [rows][heads]
  // Rows are split too, so that the running sums of a task stay in cache, and every thread has
  // work.
  int64_t longest = 0;
  for (int64_t s = 0; s < samples; s++) longest = std::max(longest, spans[2 * s + 1] * group);
  const int64_t splits =
      std::max<int64_t>({(longest + split_rows - 1) / split_rows,
                         pairs ? (2 * at::get_num_threads() - 1) / pairs : 1, 1});
  at::parallel_for(0, pairs * splits, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    FixedFpEnvironment fp_environment;
    for (int64_t i = begin; i < end; i++) {
      const int64_t split = i % splits, pair = i / splits, sample = pair / key_heads;
      const int64_t rows = spans[2 * sample + 1] * group;
      const int64_t tiles = (rows + tile_rows - 1) / tile_rows;
      const ForwardTask task{sample, pair % key_heads, tiles * split / splits * tile_rows,
                             std::min(tiles * (split + 1) / splits * tile_rows, rows)};
      if (task.first_row < task.end_row) run_task<T>(in, task, scratch, out_data, lse_data);
    }
    engine::brgemm_release(paired<T>);
  });
}

std::tuple<Tensor, Tensor> attention_op(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& spans, const Tensor& blocks,
                                        const Tensor& lengths, double scale, bool causal,
                                        int64_t window, double softcap, int64_t chunk_size) {
  check_engine();
  check_attention(q, k, v, spans, blocks, lengths);
  const at::ScalarType dtype = engine_dtype(q.scalar_type());
  Tensor out = empty_tensor(q.sizes(), dtype).zero_();
  Tensor lse = empty_tensor(q.sizes().slice(0, q.dim() - 1), at::kFloat).fill_(infinity);
  const Tensor queries = with_contiguous_depth(q, dtype), keys = with_contiguous_depth(k, dtype),
               values = with_contiguous_depth(v, dtype);
  const AttentionInputs inputs{queries,
                               keys,
                               values,
                               spans,
                               blocks,
                               lengths,
                               {q.size(-2), k.size(-2), q.size(-1)},
                               {causal, window, chunk_size},
                               {static_cast<float>(scale), static_cast<float>(softcap)}};
  dispatch_engine_dtype(dtype,
                        [&](auto tag) { attend<typename decltype(tag)::type>(inputs, out, lse); });
  return {round_tensor("attention", out, q.scalar_type()), lse};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor spans, Tensor blocks, Tensor lengths, "
      "float scale, bool causal, int window, float softcap=0.0, int chunk_size=0) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("attention", &attention_op); }

}  // namespace isobit
