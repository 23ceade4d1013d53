// Which rows form which sample, as the operators are told: (first row, rows) of each, or the usual
// [samples, tokens].
#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include "memory.h"
#include "order.h"

namespace isobit {

// The package's functions say this better, and first; here it guards memory against direct calls of
// the operators.
inline void check_spans(const at::Tensor& spans, int64_t rows) {
  TORCH_CHECK(spans.dim() == 2 && spans.size(1) == 2 && spans.scalar_type() == at::kLong &&
                  spans.is_contiguous(),
              "isobit: expected spans as contiguous int64 [samples, 2]; remedy: describe them by "
              "isobit.Samples");
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < spans.size(0); i++, span += 2)
    TORCH_CHECK(span[0] >= 0 && span[1] >= 0 && span[0] + span[1] <= rows,
                "isobit: expected spans inside ", rows, " rows, received first ", span[0], " of ",
                span[1], "; remedy: describe them by isobit.Samples");
}

// Of tokens in these leading axes: the given spans, or a sample per row of all axes but the last.
inline at::Tensor spans_of(const std::optional<at::Tensor>& spans, at::IntArrayRef leading) {
  const int64_t length = leading.empty() ? 1 : leading.back();
  int64_t count = 1;
  for (size_t axis = 0; axis + 1 < leading.size(); axis++) count *= leading[axis];
  if (spans) {
    check_spans(*spans, count * length);
    return *spans;
  }
  if (length == 0) count = 0;
  at::Tensor out = empty_tensor({count, 2}, at::kLong);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; i++) data[2 * i] = i * length, data[2 * i + 1] = length;
  return out;
}

// Whether `count` items are one subtree of the tree over `of`, wherever in it they stand.
inline bool is_subtree(int64_t count, int64_t of, int64_t cap) {
  const int64_t size = std::max<int64_t>(of / count_segments(of, 1, cap), 1),
                segments = count / size;
  return count <= of && count % size == 0 && segments > 0 && (segments & (segments - 1)) == 0;
}

// The global batch of a call: its own samples, or `of` of them. A share has fp32 gradients, which
// others merge; its subtree's value does not depend on where in the batch it stands.
struct Batch {
  int64_t samples, of;
  bool is_share() const { return of != samples; }
  at::ScalarType type(at::ScalarType parameter) const {
    return is_share() ? at::kFloat : parameter;
  }
};
inline Batch batch_of(const at::Tensor& spans, int64_t of) {
  const int64_t count = spans.size(0);
  TORCH_CHECK(of == 0 || of == count || is_subtree(count, of, sample_cap),
              "isobit: expected samples that are one subtree of ", of, ", received ", count,
              "; remedy: describe them by isobit.Samples, a power of two of segments");
  return {count, of ? of : count};
}

}  // namespace isobit
