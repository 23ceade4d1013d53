// The log-probability of chosen tokens, from hidden states and the weight of the LM head.
//
// The logits [tokens, vocabulary] never exist as a whole: they are computed for one chunk of the
// vocabulary at a time, and the backward computes them again.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "log_sum_exp.h"
#include "vocabulary.h"

namespace isobit {

namespace {

// Scales the logits [columns] of one token and one chunk in place, and adds their segments.
ISOBIT_CLONES void add_chunk(float* logits, const VocabularyChunk& chunk, float inverse_temperature,
                             MaxSumTree& tree) {
  if (inverse_temperature != 1.0f)
    for (int64_t i = 0; i < chunk.columns(); i++) logits[i] = logits[i] * inverse_temperature;
  tree.add(chunk.schedule, logits);
}

struct ForwardInputs {
  const Tensor& hidden;   // [T, K], in the engine's dtype
  const Tensor& weight;   // [words of the shard, K]
  const Tensor& targets;  // [T]
  float inverse_temperature;
  VocabularyShard shard;
};

// Tokens [first, first + rows).
//   pairs   [rows][2]: the pair (max, sum) of the shard's root
//   chosen  [rows]: the target's logit if the shard contains the target, else +0
template <class T>
void forward_tokens(const ForwardInputs& in, const std::vector<VocabularyChunk>& chunks,
                    int64_t first, int64_t rows, float* pairs, float* chosen) {
  const int64_t* targets = in.targets.const_data_ptr<int64_t>() + first;  // [rows]
  ChunkLogits<T> logits(in.hidden.narrow(0, first, rows), most_columns(chunks));
  std::vector<MaxSumTree> trees(rows);
  std::fill_n(chosen, rows, 0.0f);
  for (const VocabularyChunk& chunk : chunks) {
    const int64_t n = chunk.columns();
    const Tensor weight = in.weight.narrow(0, chunk.begin, n).to(in.hidden.scalar_type());
    float* values = logits.run(weight);  // [rows][n]
    at::parallel_for(0, rows, row_grain(n), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      for (int64_t row = begin; row < end; row++) {
        add_chunk(values + row * n, chunk, in.inverse_temperature, trees[row]);
        const int64_t target = targets[row] - in.shard.first - chunk.begin;
        if (target >= 0 && target < n) chosen[row] = values[row * n + target];
      }
    });
  }
  for (int64_t row = 0; row < rows; row++) {
    pairs[2 * row] = trees[row].total().max;
    pairs[2 * row + 1] = canonical_nan(trees[row].total().sum);
  }
}

// Returns ([T, 2] pairs, [T] chosen logits); see forward_tokens.
std::tuple<Tensor, Tensor> logprob_pairs(const Tensor& hidden, const Tensor& weight,
                                         const Tensor& targets, double temperature, int64_t extent,
                                         int64_t first) {
  check_engine();
  check_logprob(hidden, weight, targets);
  const VocabularyShard shard{extent, first};
  check_shard(shard, weight.size(0));
  const int64_t tokens = hidden.size(0);
  Tensor pairs = empty_tensor({tokens, 2}, at::kFloat);
  Tensor chosen = empty_tensor({tokens}, at::kFloat);
  const Tensor rows = hidden.to(engine_dtype(hidden.scalar_type())).contiguous();
  const ForwardInputs inputs{rows, weight, targets, 1.0f / static_cast<float>(temperature), shard};
  const std::vector<VocabularyChunk> chunks = cut_vocabulary(extent, weight.size(0));
  float* pair_data = pairs.mutable_data_ptr<float>();     // [T][2]
  float* chosen_data = chosen.mutable_data_ptr<float>();  // [T]
  dispatch_engine_dtype(rows.scalar_type(), [&](auto tag) {
    const int64_t step = forward_rows(most_columns(chunks));
    for (int64_t at = 0; at < tokens; at += step)
      forward_tokens<typename decltype(tag)::type>(inputs, chunks, at, std::min(step, tokens - at),
                                                   pair_data + 2 * at, chosen_data + at);
  });
  return {pairs, chosen};
}

// Returns ([T] log-probabilities, [T, 2] of the maximum and the logarithm of the sum). A token
// without a target (a negative one) has the log-probability 0, and no gradient. `spans` and `of`
// are not used here: autograd passes them to the gradient.
std::tuple<Tensor, Tensor> linear_logprob(const Tensor& hidden, const Tensor& weight,
                                          const Tensor& targets, double temperature,
                                          const std::optional<Tensor>& /*spans*/, int64_t /*of*/) {
  auto [stats, out] =
      logprob_pairs(hidden, weight, targets, temperature, weight.dim() ? weight.size(0) : 0, 0);
  const int64_t* target = targets.const_data_ptr<int64_t>();  // [T]
  float* logprob = out.mutable_data_ptr<float>();             // [T]: the target's logit, replaced
  float* stat = stats.mutable_data_ptr<float>();              // [T][2]
  FixedFpEnvironment fp_environment;
  for (int64_t row = 0; row < out.size(0); row++) {
    const float max = stat[2 * row], log_sum = log_positive_scalar(stat[2 * row + 1]);
    stat[2 * row + 1] = log_sum;
    logprob[row] = target[row] < 0 ? 0.0f : canonical_nan((logprob[row] - max) - log_sum);
  }
  return {out, stats};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, float temperature, "
      "Tensor? spans, int of=0) -> (Tensor, Tensor)");
  m.def(
      "linear_logprob_pairs(Tensor hidden, Tensor weight, Tensor targets, float temperature, "
      "int extent, int first) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear_logprob", &linear_logprob);
  m.impl("linear_logprob_pairs", &logprob_pairs);
}

}  // namespace isobit
