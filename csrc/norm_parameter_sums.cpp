// Sums over tokens, heads and samples for the gradients of a norm's weight and bias.
#include "norm_parameter_sums.h"

#include <ATen/Parallel.h>

namespace isobit {

namespace {

// Sums rows [items][n] to out [n]; each row is a sum already.
void merge_items(const float* rows, int64_t n, const Schedule& items, float* out) {
  auto copy_item = [&](int64_t item, float* dst) { std::copy_n(rows + item * n, n, dst); };
  ColumnSum(items, n).run(copy_item, out, 0);
}

}  // namespace

void sum_samples(const Schedule& samples, const Quarters& quarters, float* out) {
  at::parallel_for(0, quarters.width, 256, [&](int64_t begin, int64_t end) {
    FixedFpEnvironment fp_environment;
    auto sum_leaf = [&](int64_t leaf, float* dst) {
      quarters.sum_leaf(leaf, begin, end - begin, dst);
    };
    ColumnSum(samples, end - begin).run(sum_leaf, out + begin, 0);
  });
}

Tensor sum_heads(const Tensor& spans, int64_t heads, int64_t all_heads, int64_t n,
                 const Quarters& quarters) {
  FixedFpEnvironment fp_environment;
  const int64_t count = spans.size(0);
  const int64_t* span = spans.const_data_ptr<int64_t>();  // [samples][2]
  const Schedule items = item_schedule(heads, feature_cap, all_heads);
  std::vector<float> head_totals(heads * n);
  Tensor out = empty_tensor({count, n}, at::kFloat);
  for (int64_t sample = 0, first_leaf = 0; sample < count; sample++) {
    Schedule tokens;
    append_leaves(tokens, span[2 * sample], span[2 * sample + 1], false);
    tokens.segment_end.push_back(tokens.leaves.size());
    auto sum_leaf = [&](int64_t leaf, float* dst) {
      quarters.sum_leaf(first_leaf + leaf, 0, heads * n, dst);
    };
    ColumnSum(tokens, heads * n).run(sum_leaf, head_totals.data(), 0);
    first_leaf += tokens.leaf_count();
    merge_items(head_totals.data(), n, items, out.mutable_data_ptr<float>() + sample * n);
  }
  return out;
}

void merge_samples(const Tensor& totals, int64_t global_samples, float* out) {
  FixedFpEnvironment fp_environment;
  merge_items(totals.const_data_ptr<float>(), totals.size(1),
              item_schedule(totals.size(0), sample_cap, global_samples), out);
}

std::vector<int64_t> tokens_outside(const Tensor& spans, int64_t tokens) {
  std::vector<bool> inside(tokens);
  const int64_t* span = spans.const_data_ptr<int64_t>();  // [samples][2]
  for (int64_t i = 0; i < spans.size(0); i++, span += 2)
    std::fill_n(inside.begin() + span[0], span[1], true);
  std::vector<int64_t> outside;
  for (int64_t t = 0; t < tokens; t++)
    if (!inside[t]) outside.push_back(t);
  return outside;
}

}  // namespace isobit
