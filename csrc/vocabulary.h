// The vocabulary axis of the log-probability, cut into chunks whose logits fit in memory.
#pragma once

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

}  // namespace isobit
