// The sums over tokens, heads and samples that are the gradients of a norm's weight and bias.
#pragma once

#include "rows.h"
#include "samples.h"

namespace isobit {

// The quarters of all leaves of the sample schedule (see [Note: quarters] in row_norm.h).
struct Quarters {
  float* data;    // [leaves][4][width]. Not owned.
  int64_t width;  // floats of one token's terms

  // Writes columns [first, first + columns) of a leaf's sum to dst [columns]. Merges the quarters
  // in place, so it is called once per leaf and column.
  void sum_leaf(int64_t leaf, int64_t first, int64_t columns, float* dst) const {
    float* quarter = data + leaf * 4 * width + first;  // [4][columns], row stride = width
    merge4(quarter, quarter + width, quarter + 2 * width, quarter + 3 * width, columns);
    std::copy(quarter, quarter + columns, dst);
  }
};

// Sums over all samples, to out [width].
void sum_samples(const Schedule& samples, const Quarters& quarters, float* out);

// Returns [samples, n]: per sample, each head's tokens are summed, and then the heads, which are
// all of `all_heads` or one subtree of them.
Tensor sum_heads(const Tensor& spans, int64_t heads, int64_t all_heads, int64_t n,
                 const Quarters& quarters);

// Sums the totals [samples, n] of samples to out [n].
void merge_samples(const Tensor& totals, int64_t global_samples, float* out);

// The tokens that are in no sample.
std::vector<int64_t> tokens_outside(const Tensor& spans, int64_t tokens);

}  // namespace isobit
