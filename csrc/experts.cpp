// Routes of tokens to experts, and the sums of a token's rows; the order is that of
// [Note: the order of a mixture of experts] in ops/experts/portable.py.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <algorithm>
#include <optional>
#include <vector>

#include "attestation.h"
#include "dtypes.h"
#include "elementary.h"
#include "fp_environment.h"
#include "memory.h"
#include "order.h"

namespace isobit {

namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr const char* remedy = "call the function of isobit, which checks its arguments";

Tensor softmax_of(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("isobit::softmax", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(x);
}

// ---- routes
// --------------------------------------------------------------------------------------

// Whether a comes before b by the largest value, NaN first; equal ones keep the order of their ids.
ISOBIT_INLINE bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// Writes the ids of the `wanted` largest of values [count], the largest first; among equal values
// the lowest id comes first. wanted <= count.
void choose(const float* values, int64_t count, int64_t wanted, int64_t* ids) {
  int64_t held = 0;  // ids[0, held) are the best of those seen
  for (int64_t i = 0; i < count; i++) {
    if (held == wanted && !is_larger(values[i], values[ids[held - 1]])) continue;
    int64_t at = held < wanted ? held++ : held - 1;
    for (; at > 0 && is_larger(values[i], values[ids[at - 1]]); at--) ids[at] = ids[at - 1];
    ids[at] = i;
  }
}

ISOBIT_CLONES void logistic(const float* x, int64_t n, float* s) {
  for (int64_t i = 0; i < n; i += lane_count) {
    const int64_t count = std::min(lane_count, n - i);
    Floats values, found, complement;
    load_lanes(x + i, count, 0.0f, values);
    sigmoid<false>(values, found, complement);
    store_lanes(found, count, s + i);
  }
}

struct Choice {
  int64_t k, groups, top_groups;
};

// Replaces the scores [count] of all but the best groups by -inf.
void keep_groups(float* scores, int64_t count, const Choice& choice) {
  const int64_t size = count / choice.groups;
  std::vector<float> best(choice.groups);
  std::vector<int64_t> kept(std::max<int64_t>(choice.top_groups, 2));
  for (int64_t g = 0; g < choice.groups; g++) {
    const float* group = scores + g * size;  // [size]
    choose(group, size, std::min<int64_t>(size, 2), kept.data());
    best[g] = size > 1 ? group[kept[0]] + group[kept[1]] : group[kept[0]];
  }
  choose(best.data(), choice.groups, choice.top_groups, kept.data());
  for (int64_t g = 0; g < choice.groups; g++)
    if (std::find(kept.begin(), kept.begin() + choice.top_groups, g) ==
        kept.begin() + choice.top_groups)
      std::fill(scores + g * size, scores + (g + 1) * size, -infinity);
}

std::tuple<Tensor, Tensor> route_op(const Tensor& logits, const OptionalTensor& bias,
                                    const OptionalTensor& spans, int64_t k, c10::string_view score,
                                    bool normalize, double scale, int64_t groups,
                                    int64_t top_groups) {
  check_attested();
  ISOBIT_CHECK(logits.dim() == 2 && groups > 0 && logits.size(1) % groups == 0 && k > 0 &&
                   top_groups > 0 && top_groups <= groups &&
                   k <= logits.size(1) / groups * top_groups,
               "route", "logits [T, E] and k experts to choose from", describe(logits), remedy);
  ISOBIT_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == logits.size(1)), "route",
               c10::str("a bias [", logits.size(1), "]"), describe(*bias), remedy);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t rows = logits.size(0), count = logits.size(1);
  Tensor scores = logits.to(at::kFloat).contiguous();
  const Tensor wide = scores;
  if (score == "softmax") scores = softmax_of(wide);
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  Tensor weights = empty_tensor({rows, k}, at::kFloat),
         experts = empty_tensor({rows, k}, at::kLong);
  float* weight_data = weights.mutable_data_ptr<float>();      // [rows][k]
  int64_t* expert_data = experts.mutable_data_ptr<int64_t>();  // [rows][k]
  FixedFpEnvironment fp_environment;
  if (score == "sigmoid") {
    scores = empty_tensor({rows, count}, at::kFloat);
    logistic(wide.const_data_ptr<float>(), rows * count, scores.mutable_data_ptr<float>());
  }
  const float* score_data = scores.const_data_ptr<float>();  // [rows][count]
  std::vector<float> choices(count);
  for (int64_t row = 0; row < rows; row++) {
    const float* own = score_data + row * count;
    for (int64_t e = 0; e < count; e++)
      choices[e] = bias ? own[e] + added.const_data_ptr<float>()[e] : own[e];
    if (groups != top_groups) keep_groups(choices.data(), count, {k, groups, top_groups});
    int64_t* ids = expert_data + row * k;
    choose(choices.data(), count, k, ids);
    for (int64_t slot = 0; slot < k; slot++) weight_data[row * k + slot] = own[ids[slot]];
  }
  const bool of_chosen = score == "softmax_of_chosen" || score == "sigmoid_of_chosen";
  if (score == "softmax_of_chosen") {
    weights = softmax_of(weights);
    weight_data = weights.mutable_data_ptr<float>();
  } else if (score == "sigmoid_of_chosen") {
    logistic(weight_data, rows * k, weight_data);
  }
  const float factor = static_cast<float>(scale);
  for (int64_t row = 0; row < rows; row++) {
    float* own = weight_data + row * k;  // [k]
    float total = 1.0f;
    if (normalize && !of_chosen) {
      total = own[0];
      for (int64_t slot = 1; slot < k; slot++) total = total + own[slot];
      if (score == "sigmoid") total = total + 1e-20f;
    }
    for (int64_t slot = 0; slot < k; slot++)
      own[slot] = canonical_nan((of_chosen ? own[slot] : own[slot] / total) * factor);
  }
  if (spans) {  // rows that belong to no sample go to no expert
    ISOBIT_CHECK(spans->dim() == 2 && spans->size(1) == 2 && spans->scalar_type() == at::kLong &&
                     spans->is_contiguous(),
                 "route", "spans as contiguous int64 [samples, 2]", describe(*spans), remedy);
    std::vector<bool> real(rows, false);
    const int64_t* span = spans->const_data_ptr<int64_t>();  // [samples][2]
    for (int64_t i = 0; i < spans->size(0); i++, span += 2)
      for (int64_t row = std::max<int64_t>(span[0], 0); row < std::min(span[0] + span[1], rows);
           row++)
        real[row] = true;
    for (int64_t row = 0; row < rows; row++)
      if (!real[row]) {
        std::fill_n(weight_data + row * k, k, 0.0f);
        std::fill_n(expert_data + row * k, k, count);
      }
  }
  return {weights, experts};
}

// The rows of experts [T, k]: the token of each row, the row of each slot, and rows per expert. An
// expert of `count` is none.
std::tuple<Tensor, Tensor, Tensor> plan_routes_op(const Tensor& experts, int64_t count) {
  ISOBIT_CHECK(experts.dim() == 2 && experts.scalar_type() == at::kLong && count > 0, "route",
               "experts as int64 [T, k]", describe(experts), remedy);
  const Tensor held = experts.contiguous();
  const int64_t slots = held.size(1), all = held.numel();
  const int64_t* ids = held.const_data_ptr<int64_t>();  // [T][k]
  Tensor rows = empty_tensor({count}, at::kLong).zero_(),
         places = empty_tensor(held.sizes(), at::kLong);
  int64_t* counts = rows.mutable_data_ptr<int64_t>();   // [count]
  int64_t* place = places.mutable_data_ptr<int64_t>();  // [T][k]
  for (int64_t i = 0; i < all; i++) {
    ISOBIT_CHECK(ids[i] >= 0 && ids[i] <= count, "route", c10::str("experts from 0 to ", count),
                 ids[i], remedy);
    if (ids[i] < count) counts[ids[i]]++;
  }
  std::vector<int64_t> next(count);
  int64_t total = 0;
  for (int64_t e = 0; e < count; e++) {
    next[e] = total;
    total += counts[e];
  }
  Tensor tokens = empty_tensor({total}, at::kLong);
  int64_t* token = tokens.mutable_data_ptr<int64_t>();  // [R]
  for (int64_t i = 0; i < all; i++) {
    place[i] = ids[i] < count ? next[ids[i]]++ : -1;
    if (place[i] >= 0) token[place[i]] = i / slots;
  }
  return {tokens, places, rows};
}

// ---- sums of a token's rows
// ----------------------------------------------------------------------

struct Term {
  int64_t segment, place;
  float weight;
};

// out [n] = the sum of the terms' rows [n] times their weights: each segment from left to right
// from +0, then the tree. A segment without terms is +0, and no sum is -0, so that it is left out.
template <class T>
ISOBIT_INLINE void sum_terms(const T* rows, int64_t n, const Term* terms, int64_t count,
                             int64_t segments, bool weighted, T* out) {
  for (int64_t d = 0; d < n; d += lane_count) {
    const int64_t lanes = std::min(lane_count, n - d);
    Floats sums[feature_cap];
    bool used[feature_cap] = {};
    for (int64_t i = 0; i < count; i++) {
      const int64_t s = terms[i].segment;
      Floats term;
      load_lanes(rows + terms[i].place * n + d, lanes, 0.0f, term);
      if (weighted) term = term * terms[i].weight;
      sums[s] = (used[s] ? sums[s] : Floats{}) + term;
      used[s] = true;
    }
    for (int64_t step = 1; step < segments; step *= 2)
      for (int64_t s = 0; s < segments; s += 2 * step)
        if (used[s + step]) {
          sums[s] = used[s] ? sums[s] + sums[s + step] : sums[s + step];
          used[s] = true;
        }
    if (used[0])
      store_lanes(sums[0], lanes, out + d);
    else
      store_lanes(Floats{}, lanes, out + d);
  }
}

#define ISOBIT_SUM(T)                                                                      \
  ISOBIT_CLONES void sum_token(const T* rows, int64_t n, const Term* terms, int64_t count, \
                               int64_t segments, bool weighted, T* out) {                  \
    sum_terms(rows, n, terms, count, segments, weighted, out);                             \
  }
ISOBIT_SUM(float)
ISOBIT_SUM(BFloat16)
ISOBIT_SUM(Half)

Tensor combine(const Tensor& rows, const OptionalTensor& weights, const Tensor& experts,
               const Tensor& places, int64_t count) {
  check_attested();
  const bool is_table = experts.dim() == 2 && places.sizes() == experts.sizes() &&
                        experts.scalar_type() == at::kLong && places.scalar_type() == at::kLong;
  ISOBIT_CHECK(rows.dim() == 2 && is_table && count > 0, "combine",
               "rows [R, n], experts and places as int64 [T, k]",
               c10::str(describe(rows), ", ", describe(experts), " and ", describe(places)),
               remedy);
  ISOBIT_CHECK(!weights || weights->sizes() == experts.sizes(), "combine",
               c10::str("weights ", experts.sizes()), describe(*weights), remedy);
  const Tensor held = rows.contiguous(), ids = experts.contiguous(), at = places.contiguous();
  const Tensor scales = weights ? weights->to(at::kFloat).contiguous() : Tensor();
  const int64_t tokens = ids.size(0), slots = ids.size(1), n = held.size(1), all = held.size(0);
  const int64_t segments = count_segments(count, 1, feature_cap), size = count / segments;
  const int64_t* id = ids.const_data_ptr<int64_t>();    // [T][k]
  const int64_t* place = at.const_data_ptr<int64_t>();  // [T][k]
  for (int64_t i = 0; i < tokens * slots; i++)
    ISOBIT_CHECK(place[i] < 0 || (place[i] < all && id[i] >= 0 && id[i] < count), "combine",
                 c10::str("places below ", all, ", and experts below ", count),
                 c10::str("place ", place[i], " of expert ", id[i]), remedy);
  const float* scale = weights ? scales.const_data_ptr<float>() : nullptr;  // [T][k]
  Tensor out = empty_tensor({tokens, n}, held.scalar_type());
  dispatch_dtype("combine", held.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = held.const_data_ptr<T>();  // [R][n]
    T* result = out.mutable_data_ptr<T>();     // [T][n]
    const int64_t grain = std::max<int64_t>(16384 / std::max<int64_t>(n * slots, 1), 1);
    at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      std::vector<std::pair<int64_t, int64_t>> order;  // (expert, slot)
      std::vector<Term> terms;
      for (int64_t t = begin; t < end; t++) {
        order.clear();
        terms.clear();
        for (int64_t slot = 0; slot < slots; slot++)
          if (place[t * slots + slot] >= 0) order.emplace_back(id[t * slots + slot], slot);
        std::sort(order.begin(), order.end());
        for (const auto& [expert, slot] : order)
          terms.push_back(
              {expert / size, place[t * slots + slot], scale ? scale[t * slots + slot] : 1.0f});
        sum_token(data, n, terms.data(), static_cast<int64_t>(terms.size()), segments,
                  scale != nullptr, result + t * n);
      }
    });
  });
  return out;
}

Tensor combine_op(const Tensor& rows, const Tensor& weights, const Tensor& experts,
                  const Tensor& places, const Tensor& /*tokens*/, int64_t count) {
  return combine(rows, weights, experts, places, count);
}

Tensor dispatch_rows_op(const Tensor& x, const Tensor& tokens, const Tensor& /*experts*/,
                        const Tensor& /*places*/, int64_t /*count*/) {
  check_attested();
  return x.reshape({-1, x.size(-1)}).index_select(0, tokens);
}

Tensor dispatch_rows_backward_op(const Tensor& grad, const Tensor& experts, const Tensor& places,
                                 int64_t count) {
  return combine(grad, {}, experts, places, count);
}

// ---- linear layers of all experts
// ----------------------------------------------------------------

// x [R, K], weight [E, N, K] or [E, K, N] if transposed, bias [E, N]; rows: the rows of each
// expert.
Tensor grouped_linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                         at::IntArrayRef rows, bool transposed) {
  ISOBIT_CHECK(x.dim() == 2 && weight.dim() == 3 &&
                   static_cast<int64_t>(rows.size()) == weight.size(0) &&
                   x.size(1) == weight.size(transposed ? 1 : 2),
               "grouped_linear", "x [R, K] and weight [E, N, K]",
               c10::str(describe(x), " and ", describe(weight)), remedy);
  static const auto linear =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("isobit::linear", "")
          .typed<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&, int64_t)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor y = empty_tensor({x.size(0), weight.size(transposed ? 2 : 1)}, x.scalar_type());
  int64_t at = 0;
  for (size_t e = 0; e < rows.size(); at += rows[e++]) {
    if (rows[e] == 0) continue;
    const Tensor own = weight.select(0, e);
    y.narrow(0, at, rows[e])
        .copy_(linear.call(x.narrow(0, at, rows[e]), transposed ? own.t().contiguous() : own,
                           bias ? OptionalTensor(bias->select(0, e)) : OptionalTensor(), {}, {},
                           0));
  }
  ISOBIT_CHECK(at == x.size(0), "grouped_linear", c10::str(x.size(0), " rows of experts"), at,
               remedy);
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "route(Tensor logits, Tensor? bias, Tensor? spans, int k, str score, bool normalize, "
      "float scale, int groups, int top_groups) -> (Tensor, Tensor)");
  m.def("plan_routes(Tensor experts, int count) -> (Tensor, Tensor, Tensor)");
  m.def(
      "combine(Tensor rows, Tensor weights, Tensor experts, Tensor places, Tensor tokens, int "
      "count)"
      " -> Tensor");
  m.def(
      "dispatch_rows(Tensor x, Tensor tokens, Tensor experts, Tensor places, int count) -> Tensor");
  m.def("dispatch_rows_backward(Tensor grad, Tensor experts, Tensor places, int count) -> Tensor");
  m.def(
      "grouped_linear_forward(Tensor x, Tensor weight, Tensor? bias, int[] rows, bool transposed) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("route", &route_op);
  m.impl("plan_routes", &plan_routes_op);
  m.impl("combine", &combine_op);
  m.impl("dispatch_rows", &dispatch_rows_op);
  m.impl("dispatch_rows_backward", &dispatch_rows_backward_op);
  m.impl("grouped_linear_forward", &grouped_linear_op);
}

}  // namespace isobit
