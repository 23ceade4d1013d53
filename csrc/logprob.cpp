// The log-probability of chosen tokens from hidden states and the LM head's weight, and its
// gradients, without ever holding [tokens, vocabulary]: logits live for a run of the vocabulary at
// a time, and the backward computes them again.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attested.h"
#include "linear.h"
#include "log_sum_exp.h"
#include "product.h"
#include "samples.h"

namespace isobit {

namespace {

constexpr int64_t run_columns = 4096;   // of the vocabulary at a time; free
constexpr int64_t forward_rows = 1024;  // of the tokens at a time; free
constexpr int64_t few_rows =
    64;  // below it a packed copy of the hidden states has more columns than they have

// What the weight's rows are: words from `first` on of a vocabulary of `extent`, one subtree of its
// tree.
struct Shard {
  int64_t extent, first;
};

// A run of a shard's leaves: a subtree of whole segments, or a part of one.
struct Run {
  int64_t begin, end;  // columns
  Schedule leaves;     // counted from `begin`
  bool ends_segment;
  int64_t level;  // of the subtree, where it is whole segments
};

std::vector<Run> cut_vocabulary(int64_t vocabulary, int64_t words) {
  const int64_t length = vocabulary / count_segments(vocabulary, feature_unit, feature_cap),
                segments = words / length;
  std::vector<Run> runs;
  if (length <= run_columns) {
    int64_t together = 1, level = 0;
    while (together * 2 <= segments && together * 2 * length <= run_columns) together *= 2, level++;
    for (int64_t s = 0; s < segments; s += together)
      runs.push_back({s * length, (s + together) * length,
                      feature_schedule(vocabulary, 0, together), true, level});
    return runs;
  }
  const int64_t leaves = (length + feature_leaf - 1) / feature_leaf,
                most = run_columns / feature_leaf;
  const int64_t parts = (leaves + most - 1) / most;
  for (int64_t s = 0; s < segments; s++)
    for (int64_t p = 0; p < parts; p++) {
      const int64_t first = leaves * p / parts * feature_leaf,
                    last = std::min(leaves * (p + 1) / parts * feature_leaf, length);
      Schedule schedule;
      push_run(schedule, 0, last - first, feature_leaf, p > 0);
      schedule.segment_end = {static_cast<int64_t>(schedule.leaves.size())};
      runs.push_back({s * length + first, s * length + last, schedule, p + 1 == parts, 0});
    }
  return runs;
}

// Logits of some tokens for one run: [tokens, columns], in fp32.
template <class T>
class Logits {
 public:
  Logits(const Tensor& hidden, int64_t most_columns)
      : hidden_(hidden),
        schedule_(schedule_of(hidden.size(1))),
        rows_(hidden.size(0)),
        room_(empty_tensor({rows_ * most_columns}, at::kFloat)),
        packed_(rows_ < few_rows ? Tensor() : pack_weight(hidden)) {}

  // The weight's rows are the engine's rows, in place; the hidden states its columns.
  float* run(const Tensor& weight) {
    const int64_t columns = weight.size(0);
    float* out = room_.mutable_data_ptr<float>();
    const View<T> left{weight.const_data_ptr<T>(), weight.stride(0), weight.stride(1)};
    const View<T> right{hidden_.const_data_ptr<T>(), hidden_.stride(0), hidden_.stride(1)};
    const T* packed = packed_.defined() ? packed_.const_data_ptr<T>() : nullptr;
    Product<T, float>(schedule_, left, {right, packed},
                      Target<float>{out, columns, 0, nullptr, true}, columns, rows_)
        .run();
    return out;
  }

 private:
  Tensor hidden_;
  Schedule schedule_;
  int64_t rows_;
  Tensor room_, packed_;
};

ISOBIT_CLONES void fold_row(float* logits, const Run& run, float inverse_temperature,
                            PairFold& fold) {
  if (inverse_temperature != 1.0f)
    for (int64_t i = 0; i < run.end - run.begin; i++) logits[i] = logits[i] * inverse_temperature;
  size_t segment = 0;
  for (size_t leaf = 0; leaf < run.leaves.leaves.size(); leaf++) {
    const auto [start, length, onto] = run.leaves.leaves[leaf];
    const bool last = static_cast<int64_t>(leaf) + 1 == run.leaves.segment_end[segment];
    fold.add(leaf_pair(logits + start, length), onto, last && run.ends_segment);
    segment += last;
  }
}

// (onehot − softmax) · grad, where a row's maximum and the logarithm of its sum are known.
template <class T>
ISOBIT_INLINE void grad_of_row(const float* logits, int64_t n, float inverse_temperature, float max,
                               float log_sum, float grad, int64_t target, T* out) {
  for (int64_t at = 0; at < n; at += lane_count) {
    const int64_t count = std::min(lane_count, n - at);
    Floats values;
    widen_some(logits + at, count, 0.0f, values);
    values = (values * inverse_temperature - max) - log_sum;
    exp_nonpositive(values);
    values = Floats{} - values;
    if (target >= at && target < at + count) values[target - at] = 1.0f + values[target - at];
    round_some(values * grad, count, out + at);
  }
}
#define ISOBIT_GRAD(T)                                                                        \
  ISOBIT_CLONES void grad_row(const float* logits, int64_t n, float inverse_temperature,      \
                              float max, float log_sum, float grad, int64_t target, T* out) { \
    grad_of_row(logits, n, inverse_temperature, max, log_sum, grad, target, out);             \
  }
ISOBIT_GRAD(float)
ISOBIT_GRAD(BFloat16)

void check_logprob(const Tensor& hidden, const Tensor& weight, const Tensor& targets) {
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1) &&
                  weight.size(0) > 0 && targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                  targets.scalar_type() == at::kLong && targets.is_contiguous(),
              "isobit: expected hidden [T, K], weight [V, K] and int64 targets [T]; remedy: call "
              "isobit.linear_logprob");
}

void check_shard(const Shard& shard, int64_t words) {
  const int64_t parts = words > 0 ? shard.extent / words : 0;
  TORCH_CHECK(parts > 0 && parts * words == shard.extent && shard.first >= 0 &&
                  shard.first % words == 0 && shard.first < shard.extent &&
                  count_segments(shard.extent, feature_unit, feature_cap) % parts == 0,
              "isobit: expected an equal share of the segments of ", shard.extent,
              " words, received ", words, " from ", shard.first,
              "; remedy: call isobit.ops.logprob.partial with an isobit Cut");
}

// Each token's pair of the shard's root, and its target's logit where the shard has it, else +0.
template <class T>
void forward(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
             float inverse_temperature, Shard shard, Tensor& out, Tensor& pairs) {
  const std::vector<Run> runs = cut_vocabulary(shard.extent, weight.size(0));
  int64_t most = 0;
  for (const Run& run : runs) most = std::max(most, run.end - run.begin);
  const int64_t* chosen = targets.const_data_ptr<int64_t>();
  float *to = out.mutable_data_ptr<float>(), *kept = pairs.mutable_data_ptr<float>();
  for (int64_t first = 0; first < hidden.size(0); first += forward_rows) {
    const int64_t rows = std::min(forward_rows, hidden.size(0) - first);
    Logits<T> logits(hidden.narrow(0, first, rows), most);
    std::vector<PairFold> folds(rows);
    std::vector<float> found(rows, 0.0f);
    for (const Run& run : runs) {
      const int64_t n = run.end - run.begin;
      float* values = logits.run(weight.narrow(0, run.begin, n).to(hidden.scalar_type()));
      at::parallel_for(0, rows, std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
        PlainArithmetic plain;
        for (int64_t row = begin; row < end; row++) {
          fold_row(values + row * n, run, inverse_temperature, folds[row]);
          const int64_t target = chosen[first + row] - shard.first - run.begin;
          if (target >= 0 && target < n) found[row] = values[row * n + target];
        }
      });
    }
    for (int64_t row = 0; row < rows; row++) {
      kept[2 * (first + row)] = folds[row].total().max,
                        kept[2 * (first + row) + 1] = one_nan(folds[row].total().sum);
      to[first + row] = found[row];
    }
  }
}

std::tuple<Tensor, Tensor> pairs_op(const Tensor& hidden, const Tensor& weight,
                                    const Tensor& targets, double temperature, int64_t extent,
                                    int64_t first) {
  check_engine();
  check_logprob(hidden, weight, targets);
  check_shard({extent, first}, weight.size(0));
  Tensor pairs = empty_tensor({hidden.size(0), 2}, at::kFloat),
         chosen = empty_tensor({hidden.size(0)}, at::kFloat);
  const Tensor rows = hidden.to(engine_type(hidden.scalar_type())).contiguous();
  const float inverse = 1.0f / static_cast<float>(temperature);
  if (rows.scalar_type() == at::kFloat)
    forward<float>(rows, weight, targets, inverse, {extent, first}, chosen, pairs);
  else
    forward<BFloat16>(rows, weight, targets, inverse, {extent, first}, chosen, pairs);
  return {pairs, chosen};
}

// A token without a target (a negative one) has the log-probability 0, and no gradient.
std::tuple<Tensor, Tensor> logprob_op(const Tensor& hidden, const Tensor& weight,
                                      const Tensor& targets, double temperature,
                                      const std::optional<Tensor>&, int64_t) {
  auto [stats, out] =
      pairs_op(hidden, weight, targets, temperature, weight.dim() ? weight.size(0) : 0, 0);
  const int64_t* chosen = targets.const_data_ptr<int64_t>();
  float *to = out.mutable_data_ptr<float>(), *kept = stats.mutable_data_ptr<float>();
  PlainArithmetic plain;
  for (int64_t row = 0; row < out.size(0); row++) {
    float& sum = kept[2 * row + 1];
    sum = log_of(sum);
    to[row] = chosen[row] < 0 ? 0.0f : one_nan((to[row] - kept[2 * row]) - sum);
  }
  return {out, stats};
}

// The subtrees of dX that are finished, from left to right.
class Counter {
 public:
  Counter(int64_t rows, int64_t cols) : rows_(rows), cols_(cols) {}
  Tensor& open() {
    if (!open_.defined()) open_ = empty_tensor({rows_, cols_}, at::kFloat);
    return open_;
  }
  void close(int64_t level) {
    int64_t at = level;
    while (!levels_.empty() && levels_.back() == at) {
      add(done_.back(), open_);
      open_ = done_.back();
      done_.pop_back(), levels_.pop_back();
      at++;
    }
    done_.push_back(open_), levels_.push_back(at);
    open_ = Tensor();
  }
  const Tensor& total() const { return done_.front(); }

 private:
  void add(Tensor& left, const Tensor& right) {
    float* a = left.mutable_data_ptr<float>();
    const float* b = right.const_data_ptr<float>();
    at::parallel_for(0, rows_ * cols_, 1 << 15, [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      merge2(a + begin, b + begin, end - begin);
    });
  }
  int64_t rows_, cols_;
  Tensor open_;
  std::vector<Tensor> done_;
  std::vector<int64_t> levels_;
};

struct Wanted {
  bool hidden, weight;
};

template <class T>
void backward(const Tensor& grad, const Tensor& hidden, const Tensor& weight, const Tensor& targets,
              const Tensor& stats, const Tensor& spans, float inverse_temperature, int64_t global,
              Shard shard, Wanted wanted, Counter& hidden_grad, Tensor& weight_grad) {
  const std::vector<Run> runs = cut_vocabulary(shard.extent, weight.size(0));
  int64_t most = 0;
  for (const Run& run : runs) most = std::max(most, run.end - run.begin);
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  const int64_t* chosen = targets.const_data_ptr<int64_t>();
  const float *given = grad.const_data_ptr<float>(), *kept = stats.const_data_ptr<float>();
  Logits<T> logits(hidden, most);
  Tensor room = paired<T> ? empty_tensor({rows * most}, hidden.scalar_type()) : Tensor();
  const Schedule samples =
      sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), 0, global);
  for (const Run& run : runs) {
    const int64_t n = run.end - run.begin;
    const Tensor part = weight.narrow(0, run.begin, n).to(hidden.scalar_type());
    float* values = logits.run(part);
    T* grads = paired<T> ? room.mutable_data_ptr<T>() : reinterpret_cast<T*>(values);
    at::parallel_for(0, rows, std::max<int64_t>(grain / n, 1), [&](int64_t begin, int64_t end) {
      PlainArithmetic plain;
      for (int64_t row = begin; row < end; row++) {
        const float scaled = chosen[row] < 0 ? 0.0f : given[row] * inverse_temperature;
        grad_row(values + row * n, n, inverse_temperature, kept[2 * row], kept[2 * row + 1], scaled,
                 chosen[row] - shard.first - run.begin, grads + row * n);
      }
    });
    if (wanted.hidden) {
      const View<T> left{grads, n, 1},
          right{part.const_data_ptr<T>(), part.stride(1), part.stride(0)};
      const Target<float> target{hidden_grad.open().mutable_data_ptr<float>(), width, 0, nullptr,
                                 false};
      Product<T, float>(run.leaves, left, {right, nullptr}, target, rows, width).run();
      if (run.ends_segment) hidden_grad.close(run.level);
    }
    if (wanted.weight && spans.size(0) > 0) {
      const View<T> left{grads, 1, n}, right{hidden.const_data_ptr<T>(), 1, width};
      by_type(weight_grad, [&](auto* type) {
        using Out = std::remove_pointer_t<decltype(type)>;
        Out* to = weight_grad.mutable_data_ptr<Out>() + run.begin * width;
        const bool swap =
            width < n;  // the rows' operand is copied whole: let it be the smaller one
        const Target<Out> target{to, width, 0, nullptr, swap};
        if (swap)
          Product<T, Out>(samples, right, {left, nullptr}, target, width, n).run();
        else
          Product<T, Out>(samples, left, {right, nullptr}, target, n, width).run();
      });
    }
  }
}

// dhidden is the shard's root, rounded to the type named; dweight is fp32 where the spans are a
// share of more samples.
std::tuple<Tensor, Tensor> gradients(const Tensor& grad, const Tensor& hidden, const Tensor& weight,
                                     const Tensor& targets, const Tensor& stats,
                                     const Tensor& spans, double temperature, bool want_hidden,
                                     bool want_weight, int64_t of, Shard shard,
                                     at::ScalarType hidden_type) {
  check_engine();
  check_logprob(hidden, weight, targets);
  check_spans(spans, hidden.size(0));
  check_shard(shard, weight.size(0));
  const Batch batch = batch_of(spans, want_weight ? of : 0);
  TORCH_CHECK(
      grad.sizes() == targets.sizes() && grad.scalar_type() == at::kFloat &&
          stats.is_contiguous() && stats.numel() == 2 * grad.numel() &&
          stats.scalar_type() == at::kFloat,
      "isobit: expected fp32 gradients [T] and sums [T, 2]; remedy: let autograd call this");
  const Tensor rows = hidden.to(engine_type(hidden.scalar_type())).contiguous(),
               given = grad.contiguous();
  Counter hidden_grad(rows.size(0), rows.size(1));
  Tensor weight_grad = empty_tensor(want_weight ? weight.sizes() : at::IntArrayRef{0},
                                    batch.type(weight.scalar_type()));
  if (want_weight && spans.size(0) == 0) weight_grad.zero_();
  const float inverse = 1.0f / static_cast<float>(temperature);
  const Wanted wanted{want_hidden && rows.size(0) > 0, want_weight};
  auto go = [&](auto zero) {
    backward<decltype(zero)>(given, rows, weight, targets, stats, spans, inverse, batch.of, shard,
                             wanted, hidden_grad, weight_grad);
  };
  if (rows.scalar_type() == at::kFloat)
    go(float());
  else
    go(BFloat16());
  if (!wanted.hidden) return {empty_tensor({0, hidden.size(1)}, hidden_type), weight_grad};
  Tensor out = empty_tensor(hidden.sizes(), hidden_type);
  by_type(out, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    const int64_t n = hidden.numel();
    finish(hidden_grad.total().const_data_ptr<float>(), nullptr, nullptr, nullptr, n, nullptr, 1, n,
           out.mutable_data_ptr<Out>(), n);
  });
  return {out, weight_grad};
}

std::tuple<Tensor, Tensor> logprob_backward_op(const Tensor& grad, const Tensor& hidden,
                                               const Tensor& weight, const Tensor& targets,
                                               const Tensor& stats, const Tensor& spans,
                                               double temperature, bool want_hidden,
                                               bool want_weight, int64_t of) {
  const Shard whole{weight.dim() ? weight.size(0) : 0, 0};
  return gradients(grad, hidden, weight, targets, stats, spans, temperature, want_hidden,
                   want_weight, of, whole, hidden.scalar_type());
}

std::tuple<Tensor, Tensor> shard_backward_op(const Tensor& grad, const Tensor& hidden,
                                             const Tensor& weight, const Tensor& targets,
                                             const Tensor& stats, const Tensor& spans,
                                             double temperature, bool want_hidden, bool want_weight,
                                             int64_t of, int64_t extent, int64_t first) {
  return gradients(grad, hidden, weight, targets, stats, spans, temperature, want_hidden,
                   want_weight, of, {extent, first}, at::kFloat);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "linear_logprob(Tensor hidden, Tensor weight, Tensor targets, float temperature, Tensor? "
      "spans, int of=0) "
      "-> (Tensor, Tensor)");
  m.def(
      "linear_logprob_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor targets, Tensor "
      "stats, Tensor spans, "
      "float temperature, bool want_hidden, bool want_weight, int of=0) -> (Tensor, Tensor)");
  m.def(
      "linear_logprob_pairs(Tensor hidden, Tensor weight, Tensor targets, float temperature, int "
      "extent, int first) "
      "-> (Tensor, Tensor)");
  m.def(
      "linear_logprob_shard_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor targets, "
      "Tensor stats, "
      "Tensor spans, float temperature, bool want_hidden, bool want_weight, int of, int extent, "
      "int first) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear_logprob", &logprob_op);
  m.impl("linear_logprob_backward", &logprob_backward_op);
  m.impl("linear_logprob_pairs", &pairs_op);
  m.impl("linear_logprob_shard_backward", &shard_backward_op);
}

}  // namespace isobit
