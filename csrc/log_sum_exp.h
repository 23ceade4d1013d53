// The log-sum-exp of a feature axis, as a sum of pairs (max, sum of exp(x - max)).
//
// Each segment has its own maximum, and merging two pairs rescales both sums to the larger one.
// Ranks that hold shards of a vocabulary can therefore exchange pairs, and the logits are read only
// once.
#pragma once

#include "exponential.h"
#include "logarithm.h"
#include "rows.h"

namespace isobit {

struct MaxSum {
  float max = -infinity, sum = 0.0f;
};

// Avoids inf - inf where all values are -inf.
ISOBIT_INLINE float finite_or_zero(float max) { return max == -infinity ? 0.0f : max; }

// The terms exp(x - max) of a row (see [Note: terms] in sums.h).
template <class T>
struct ExpTerms {
  const T* x;  // [n]
  float max;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    load_lanes(x + at, count, -infinity, values);
    values = values - max;
    exp_nonpositive(values);
  }
  ISOBIT_INLINE void four(int64_t at, Floats4& values) const {
    load(x + at, values);
    values = values - max;
    exp_nonpositive(values);
  }
};

// The pair of one segment; `x` is [n].
template <bool four, class T>
ISOBIT_INLINE MaxSum max_sum_of_segment(const T* x, int64_t n) {
  const float max = max_of_row(x, n);
  return {max, sum_leaf<four>(0, n, ExpTerms<T>{x, finite_or_zero(max)})};
}

// Order: one merge of a feature schedule, done by MaxSumTree.
ISOBIT_INLINE MaxSum merge(const MaxSum& left, const MaxSum& right) {
  const float max = left.max < right.max ? right.max : left.max, reference = finite_or_zero(max);
  Floats factors = {left.max - reference, right.max - reference};
  exp_nonpositive(factors);
  return {max, left.sum * factors[0] + right.sum * factors[1]};
}

// Merges segments from left to right, and keeps the finished subtrees on a stack, as a binary
// counter does.
class MaxSumTree {
 public:
  // Adds the segments of a schedule; leaf positions count from x.
  template <bool four = false, class T>
  ISOBIT_INLINE void add(const Schedule& schedule, const T* x) {
    for (const Leaf& leaf : schedule.leaves) {
      stack_[top_++] = max_sum_of_segment<four>(x + leaf.start, leaf.length);
      for (int64_t done = ++segments_; done % 2 == 0; done /= 2, top_--)
        stack_[top_ - 2] = merge(stack_[top_ - 2], stack_[top_ - 1]);
    }
  }
  const MaxSum& total() const { return stack_[0]; }

 private:
  MaxSum stack_[feature_tree_depth];
  int64_t top_ = 0, segments_ = 0;
};

ISOBIT_INLINE float log_positive_scalar(float x) {
  Floats value = Floats{} + x;
  log_positive(value);
  return value[0];
}

}  // namespace isobit
