// Cuts the vocabulary into chunks, and checks the arguments of the log-probability.
#include "vocabulary.h"

namespace isobit {

std::vector<VocabularyChunk> cut_vocabulary(int64_t extent, int64_t words) {
  const int64_t length = extent / count_segments(extent, feature_unit, feature_cap);
  const int64_t segments = words / length;
  int64_t together = 1, level = 0;  // segments of a chunk, and the level of their root
  while (together * 2 <= segments && together * 2 * length <= chunk_columns) {
    together *= 2;
    level++;
  }
  std::vector<VocabularyChunk> chunks;
  for (int64_t s = 0; s < segments; s += together)
    chunks.push_back(
        {s * length, (s + together) * length, feature_schedule(extent, 0, together), level});
  return chunks;
}

void check_logprob(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  const char *function = "linear_logprob", *remedy = "call isobit.linear_logprob";
  ISOBIT_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                   weight.size(0) > 0,
               function, "hidden [T, K] and weight [V, K]",
               c10::str("hidden ", describe(hidden), " and weight ", describe(weight)), remedy);
  ISOBIT_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                   targets.scalar_type() == at::kLong && targets.is_contiguous(),
               function, c10::str("targets as contiguous int64 [", hidden.size(0), "]"),
               describe(targets), remedy);
}

void check_shard(const VocabularyShard& shard, int64_t words) {
  const int64_t parts = words > 0 ? shard.extent / words : 0;
  ISOBIT_CHECK(
      parts > 0 && parts * words == shard.extent && shard.first >= 0 && shard.first % words == 0 &&
          shard.first < shard.extent &&
          count_segments(shard.extent, feature_unit, feature_cap) % parts == 0,
      "linear_logprob", c10::str("an equal share of the segments of ", shard.extent, " words"),
      c10::str(words, " words from word ", shard.first), "cut the vocabulary by an isobit Cut");
}

}  // namespace isobit
