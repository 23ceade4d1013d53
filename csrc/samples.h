// The samples of a call: which rows form which sample, and whether the call has the whole batch.
//
// [Note: spans and of] Sums over tokens run sample by sample. `spans` is an int64 tensor
// [samples, 2] of (first row, number of rows) per sample; without it, tokens [samples, tokens] are
// meant. `of` is the number of samples of the global batch; 0 means that the call has all of them.
// A call with fewer has a share: one subtree of the tree over the global batch. Its gradients are
// fp32, and other calls merge them. A subtree's sum does not depend on its position in the batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include "errors.h"
#include "memory.h"
#include "order.h"

namespace isobit {

inline void check_spans(const char* function, const at::Tensor& spans, int64_t rows) {
  const char* remedy = "describe the samples by isobit.Samples";
  ISOBIT_CHECK(spans.dim() == 2 && spans.size(1) == 2 && spans.scalar_type() == at::kLong &&
                   spans.is_contiguous(),
               function, "spans as contiguous int64 [samples, 2]", describe(spans), remedy);
  const int64_t* span = spans.const_data_ptr<int64_t>();  // [samples][2]
  for (int64_t i = 0; i < spans.size(0); i++, span += 2)
    ISOBIT_CHECK(span[0] >= 0 && span[1] >= 0 && span[0] + span[1] <= rows, function,
                 c10::str("every sample inside ", rows, " rows"),
                 c10::str("sample ", i, " of ", span[1], " rows from row ", span[0]), remedy);
}

// The given spans; without them, one sample per index of all axes of `leading` but the last, which
// counts tokens.
inline at::Tensor spans_or_default(const char* function, const std::optional<at::Tensor>& spans,
                                   at::IntArrayRef leading) {
  const int64_t length = leading.empty() ? 1 : leading.back();
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < leading.size(); axis++) count *= leading[axis];
  if (spans) {
    check_spans(function, *spans, count * length);
    return *spans;
  }
  if (length == 0) count = 0;
  at::Tensor out = empty_tensor({count, 2}, at::kLong);
  int64_t* span = out.mutable_data_ptr<int64_t>();  // [count][2]
  for (int64_t i = 0; i < count; i++) {
    span[2 * i] = i * length;
    span[2 * i + 1] = length;
  }
  return out;
}

inline Schedule sample_schedule(const at::Tensor& spans, int64_t first, int64_t global) {
  return sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), first, global);
}

// Whether `count` items, at a suitable position, are one subtree of the tree over `global` items.
inline bool is_subtree(int64_t count, int64_t global, int64_t cap) {
  const int64_t size = std::max<int64_t>(global / count_segments(global, 1, cap), 1);
  const int64_t segments = count / size;
  return count <= global && count % size == 0 && segments > 0 && (segments & (segments - 1)) == 0;
}

struct GlobalBatch {
  int64_t local_samples, global_samples;
  bool is_share() const { return global_samples != local_samples; }
  at::ScalarType grad_dtype(at::ScalarType parameter) const {
    return is_share() ? at::kFloat : parameter;
  }
};

inline GlobalBatch global_batch(const char* function, const at::Tensor& spans, int64_t of) {
  const int64_t count = spans.size(0);
  ISOBIT_CHECK(of == 0 || of == count || is_subtree(count, of, sample_cap), function,
               c10::str("samples that are one subtree of a global batch of ", of),
               c10::str(count, " samples"),
               "describe them by isobit.Samples; their number must be a power of two of segments");
  return {count, of ? of : count};
}

}  // namespace isobit
