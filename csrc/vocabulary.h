// The vocabulary axis of the log-probability, cut into chunks whose logits fit in memory.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "linear.h"
#include "packed_weight.h"
#include "product.h"
#include "rows.h"

namespace isobit {

// A chunk has at most so many columns, unless one segment has more; not part of the order.
constexpr int64_t chunk_columns = 4096;
// With fewer rows, a packed copy of the hidden states would be mostly padding.
constexpr int64_t packed_rows = 64;

// The words that the rows of a call's weight are: from `first` on, of a vocabulary of `extent`
// words. They are one subtree of the vocabulary's tree.
struct VocabularyShard {
  int64_t extent, first;
};

// Consecutive segments of a shard: one subtree.
struct VocabularyChunk {
  int64_t begin, end;  // columns of the shard
  Schedule schedule;   // of its row sums; leaf positions count from `begin`
  int64_t level;       // of the subtree's root

  int64_t columns() const { return end - begin; }
};

// Cuts a shard of `words` words of a vocabulary of `extent` words.
std::vector<VocabularyChunk> cut_vocabulary(int64_t extent, int64_t words);

inline int64_t most_columns(const std::vector<VocabularyChunk>& chunks) {
  int64_t most = 0;
  for (const VocabularyChunk& chunk : chunks) most = std::max(most, chunk.columns());
  return most;
}

// Tokens at a time, for chunks of some columns: as many as keep the logits in 16 MB, but whole
// panels of them. Not part of the order.
inline int64_t forward_rows(int64_t columns) {
  return std::clamp<int64_t>((1 << 22) / columns / panel_width, 1, 16) * panel_width;
}

// Raises unless hidden is [T, K], weight [V, K] and targets int64 [T].
void check_logprob(const Tensor& hidden, const Tensor& weight, const Tensor& targets);

// Raises unless `words` words are a shard as described above.
void check_shard(const VocabularyShard& shard, int64_t words);

// Computes fp32 logits of some tokens, one chunk of the vocabulary at a time.
template <class T>
class ChunkLogits {
 public:
  // `hidden` is [tokens, K] in the engine's dtype.
  ChunkLogits(const Tensor& hidden, int64_t most_columns)
      : hidden_(hidden),
        schedule_(product_schedule(hidden.size(1))),
        rows_(hidden.size(0)),
        logits_(empty_tensor({rows_ * most_columns}, at::kFloat)),
        packed_(rows_ < packed_rows ? Tensor() : pack_weight(hidden)) {}

  // `weight` is [columns, K]. Returns [tokens][columns], valid until the next call.
  // The weight is the left operand, read in place; the hidden states are the right operand.
  float* run(const Tensor& weight) {
    const int64_t columns = weight.size(0);
    float* out = logits_.mutable_data_ptr<float>();  // [tokens][columns]
    const T* packed =
        packed_.defined() ? packed_.const_data_ptr<T>() : nullptr;  // see RightOperand
    Product<T, float>(schedule_, matrix_view<T>(weight, 0, 1),
                      {matrix_view<T>(hidden_, 0, 1), packed},
                      Output<float>{out, columns, 0, nullptr, true}, columns, rows_)
        .run();
    return out;
  }

 private:
  Tensor hidden_;  // [tokens, K]
  Schedule schedule_;
  int64_t rows_;
  Tensor logits_;  // [tokens * most columns]
  Tensor packed_;  // the hidden states as pack_weight returns them, or undefined
};

// Sums dX [rows, cols] over the vocabulary: a binary counter of finished subtrees.
class SubtreeCounter {
 public:
  SubtreeCounter(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {}

  // Memory for the sum of the next subtree.
  Tensor make_sum() const { return empty_tensor({rows_, cols_}, at::kFloat); }

  // Takes the next subtree, with its root at `level`.
  void push(Tensor sum, int64_t level) {
    while (!levels_.empty() && levels_.back() == level) {
      merge(done_.back(), sum);
      sum = done_.back();
      done_.pop_back();
      levels_.pop_back();
      level++;
    }
    done_.push_back(sum);
    levels_.push_back(level);
  }

  const Tensor& total() const { return done_.front(); }

 private:
  void merge(Tensor& left, const Tensor& right) {
    float* a = left.mutable_data_ptr<float>();       // [rows * cols]
    const float* b = right.const_data_ptr<float>();  // [rows * cols]
    at::parallel_for(0, rows_ * cols_, 1 << 15, [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      merge2(a + begin, b + begin, end - begin);
    });
  }

  int64_t rows_, cols_;
  std::vector<Tensor> done_;     // subtrees that wait for their right sibling
  std::vector<int64_t> levels_;  // of their roots
};

// Adds a chunk's part of dX [rows, K]. `weight` is [columns, K]; `grads` [rows][columns] are the
// gradients of the chunk's logits.
template <class T>
void add_hidden_grad(int64_t extent, const VocabularyChunk& chunk, const Tensor& weight,
                     const T* grads, SubtreeCounter& hidden_grad) {
  Tensor sum = hidden_grad.make_sum();
  const int64_t rows = sum.size(0), width = sum.size(1);
  const Output<float> output{sum.mutable_data_ptr<float>(), width, 0, nullptr, false};
  const Schedule words = product_schedule(extent, 0, chunk.schedule.segment_count());
  Product<T, float>(words, MatrixView<T>{grads, chunk.columns(), 1},
                    {matrix_view<T>(weight, 1, 0), nullptr}, output, rows, width)
      .run();
  hidden_grad.push(sum, chunk.level);
}

// Writes the rows of dW that belong to a chunk. `hidden` is [T, K]; `grads` is [T][columns];
// `weight_grad` is [words, K].
template <class T>
void write_weight_grad(const Tensor& hidden, const VocabularyChunk& chunk, const Schedule& samples,
                       const T* grads, Tensor& weight_grad) {
  const int64_t n = chunk.columns(), width = hidden.size(1);
  const MatrixView<T> left{grads, 1, n};                            // [n][T]
  const MatrixView<T> right{hidden.const_data_ptr<T>(), 1, width};  // [K][T]
  dispatch_dtype("linear_logprob", weight_grad.scalar_type(), [&](auto tag) {
    using Out = typename decltype(tag)::type;
    Out* out = weight_grad.mutable_data_ptr<Out>() + chunk.begin * width;  // [n][K]
    // The left operand of the product is copied as a whole: let it be the smaller one.
    const bool swap = width < n;
    const Output<Out> output{out, width, 0, nullptr, swap};
    if (swap)
      Product<T, Out>(samples, right, {left, nullptr}, output, width, n).run();
    else
      Product<T, Out>(samples, left, {right, nullptr}, output, n, width).run();
  });
}

}  // namespace isobit
