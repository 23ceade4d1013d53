// The log-sum-exp of a feature axis adds pairs (max, sum): a leaf has its own maximum, and a merge
// rescales to the larger.
//
// So shares of a vocabulary exchange pairs, and logits need no second pass.
#pragma once

#include "exponential.h"
#include "logarithm.h"
#include "rows.h"

namespace isobit {

struct MaxSum {
  float max = -infinity, sum = 0.0f;
};

ISOBIT_INLINE float finite_or_zero(float max) { return max == -infinity ? 0.0f : max; }

// exp(x - max), sixteen at a time.
template <class T>
struct ExponentialTerms {
  const T* x;
  float max;
  ISOBIT_INLINE void operator()(int64_t at, int64_t count, Floats& values) const {
    widen_some(x + at, count, -infinity, values);
    values = values - max;
    exp_nonpositive(values);
  }
};

template <class T>
ISOBIT_INLINE MaxSum leaf_pair(const T* x, int64_t n) {
  const float max = max_of_row(x, n);
  return {max, sum_leaf(0, n, ExponentialTerms<T>{x, finite_or_zero(max)})};
}

ISOBIT_INLINE MaxSum merge_pairs(const MaxSum& left, const MaxSum& right) {
  const float max = left.max < right.max ? right.max : left.max, base = finite_or_zero(max);
  Floats factors = {left.max - base, right.max - base};
  exp_nonpositive(factors);
  return {max, left.sum * factors[0] + right.sum * factors[1]};
}

// Takes leaves from left to right; a counter of subtrees, as the products have.
class PairFold {
 public:
  ISOBIT_INLINE void add(const MaxSum& leaf, bool fold, bool ends_segment) {
    open_ = fold ? merge_pairs(open_, leaf) : leaf;
    if (!ends_segment) return;
    stack_[top_++] = open_;
    for (int64_t done = ++segments_; done % 2 == 0; done /= 2, top_--)
      stack_[top_ - 2] = merge_pairs(stack_[top_ - 2], stack_[top_ - 1]);
  }
  const MaxSum& total() const { return stack_[0]; }

 private:
  MaxSum open_, stack_[5];
  int64_t top_ = 0, segments_ = 0;
};

ISOBIT_INLINE float log_of(float x) {
  Floats value = Floats{} + x;
  log_positive(value);
  return value[0];
}

}  // namespace isobit
