// The gradients of the log-probability: the logits are computed again, chunk by chunk.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "exponential.h"
#include "samples.h"
#include "vocabulary.h"

namespace isobit {

namespace {

// One token and one chunk.
template <class T>
struct LogitGrad {
  const float* logits;  // [n]
  int64_t n;
  float inverse_temperature;
  float max, log_sum;  // of the token, from the forward
  float grad;          // of the token's log-probability, over the temperature
  int64_t target;      // the column of the target, if in [0, n)
  T* out;              // [n], may be the memory of the logits
};

// out = (onehot(target) − softmax) · grad
template <class T>
ISOBIT_INLINE void grad_of_row(const LogitGrad<T> row) {
  for (int64_t at = 0; at < row.n; at += lane_count) {
    const int64_t count = std::min(lane_count, row.n - at);
    Floats values;
    load_lanes(row.logits + at, count, 0.0f, values);
    values = (values * row.inverse_temperature - row.max) - row.log_sum;
    exp_nonpositive(values);
    values = Floats{} - values;
    if (row.target >= at && row.target < at + count)
      values[row.target - at] = 1.0f + values[row.target - at];
    store_lanes(values * row.grad, count, row.out + at);
  }
}
#define ISOBIT_LOGIT_GRAD(T) \
  ISOBIT_CLONES void grad_row(const LogitGrad<T> row) { grad_of_row(row); }
ISOBIT_LOGIT_GRAD(float)
ISOBIT_LOGIT_GRAD(BFloat16)

struct BackwardInputs {
  const Tensor& grad;     // fp32 [T]
  const Tensor& hidden;   // [T, K], in the engine's dtype
  const Tensor& weight;   // [words of the shard, K]
  const Tensor& targets;  // [T]
  const Tensor& stats;    // fp32 [T, 2]: maximum and logarithm of the sum, from the forward
  const Tensor& spans;    // [samples, 2]
  float inverse_temperature;
  int64_t global_samples;
  VocabularyShard shard;
  bool wants_hidden, wants_weight;
};

// Replaces the logits of a chunk by their gradients.
//   logits  [T][n]
//   grads   [T][n], may be the memory of the logits
template <class T>
void write_logit_grads(const BackwardInputs& in, const VocabularyChunk& chunk, const float* logits,
                       T* grads) {
  const int64_t n = chunk.columns();
  const int64_t* targets = in.targets.const_data_ptr<int64_t>();  // [T]
  const float* grad = in.grad.const_data_ptr<float>();            // [T]
  const float* stats = in.stats.const_data_ptr<float>();          // [T][2]
  at::parallel_for(0, in.hidden.size(0), row_grain(n), [&](int64_t begin, int64_t end) {
    FixedFpEnvironment fp_environment;
    for (int64_t row = begin; row < end; row++) {
      const float scaled = targets[row] < 0 ? 0.0f : grad[row] * in.inverse_temperature;
      grad_row(LogitGrad<T>{logits + row * n, n, in.inverse_temperature, stats[2 * row],
                            stats[2 * row + 1], scaled, targets[row] - in.shard.first - chunk.begin,
                            grads + row * n});
    }
  });
}

template <class T>
void backward(const BackwardInputs& in, SubtreeCounter& hidden_grad, Tensor& weight_grad) {
  const std::vector<VocabularyChunk> chunks = cut_vocabulary(in.shard.extent, in.weight.size(0));
  const int64_t rows = in.hidden.size(0), most = most_columns(chunks);
  ChunkLogits<T> logits(in.hidden, most);
  // fp32 gradients overwrite the logits.
  Tensor narrow_grads = paired<T> ? empty_tensor({rows * most}, in.hidden.scalar_type()) : Tensor();
  const Schedule samples = sample_schedule(in.spans, 0, in.global_samples);
  for (const VocabularyChunk& chunk : chunks) {
    const Tensor weight =
        in.weight.narrow(0, chunk.begin, chunk.columns()).to(in.hidden.scalar_type());
    float* values = logits.run(weight);  // [T][n]
    T* grads =                           // [T][n]
        paired<T> ? narrow_grads.mutable_data_ptr<T>() : reinterpret_cast<T*>(values);
    write_logit_grads(in, chunk, values, grads);
    if (in.wants_hidden) add_hidden_grad(in.shard.extent, chunk, weight, grads, hidden_grad);
    if (in.wants_weight && in.spans.size(0) > 0)
      write_weight_grad(in.hidden, chunk, samples, grads, weight_grad);
  }
}

// Which part of the gradient a call computes.
struct BackwardRequest {
  bool wants_hidden, wants_weight;
  int64_t of;  // see [Note: spans and of] in samples.h
  VocabularyShard shard;
  at::ScalarType hidden_dtype;  // to which dhidden is rounded
};

void check_backward(const Tensor& grad, const Tensor& targets, const Tensor& stats) {
  ISOBIT_CHECK(grad.sizes() == targets.sizes() && grad.scalar_type() == at::kFloat &&
                   stats.is_contiguous() && stats.numel() == 2 * grad.numel() &&
                   stats.scalar_type() == at::kFloat,
               "linear_logprob",
               c10::str("a gradient float32 ", targets.sizes(), " and contiguous stats float32 [",
                        targets.numel(), ", 2]"),
               c10::str("gradient ", describe(grad), " and stats ", describe(stats)),
               "call isobit.linear_logprob, and let autograd call this");
}

// Returns (dhidden, dweight). dhidden is the root of the shard; dweight is fp32 if the spans are a
// share of the global batch.
std::tuple<Tensor, Tensor> gradients(const Tensor& grad, const Tensor& hidden, const Tensor& weight,
                                     const Tensor& targets, const Tensor& stats,
                                     const Tensor& spans, double temperature,
                                     const BackwardRequest& request) {
  check_engine();
  check_logprob(hidden, weight, targets);
  check_spans("linear_logprob", spans, hidden.size(0));
  check_shard(request.shard, weight.size(0));
  const bool wants_weight = request.wants_weight;
  const GlobalBatch batch = global_batch("linear_logprob", spans, wants_weight ? request.of : 0);
  check_backward(grad, targets, stats);
  const Tensor rows = hidden.to(engine_dtype(hidden.scalar_type())).contiguous();
  const Tensor token_grads = grad.contiguous();
  SubtreeCounter hidden_grad(rows.size(0), rows.size(1));
  Tensor weight_grad = empty_tensor(wants_weight ? weight.sizes() : at::IntArrayRef{0},
                                    batch.grad_dtype(weight.scalar_type()));
  if (wants_weight && spans.size(0) == 0) weight_grad.zero_();
  const bool wants_hidden = request.wants_hidden && rows.size(0) > 0;
  const BackwardInputs inputs{token_grads,
                              rows,
                              weight,
                              targets,
                              stats,
                              spans,
                              1.0f / static_cast<float>(temperature),
                              batch.global_samples,
                              request.shard,
                              wants_hidden,
                              wants_weight};
  dispatch_engine_dtype(rows.scalar_type(), [&](auto tag) {
    backward<typename decltype(tag)::type>(inputs, hidden_grad, weight_grad);
  });
  if (!wants_hidden) return {empty_tensor({0, hidden.size(1)}, request.hidden_dtype), weight_grad};
  Tensor out = empty_tensor(hidden.sizes(), request.hidden_dtype);
  dispatch_dtype("linear_logprob", request.hidden_dtype, [&](auto tag) {
    round_sums(hidden_grad.total().const_data_ptr<float>(), hidden.numel(),
               out.mutable_data_ptr<typename decltype(tag)::type>());
  });
  return {out, weight_grad};
}

std::tuple<Tensor, Tensor> logprob_backward(const Tensor& grad, const Tensor& hidden,
                                            const Tensor& weight, const Tensor& targets,
                                            const Tensor& stats, const Tensor& spans,
                                            double temperature, bool want_hidden, bool want_weight,
                                            int64_t of) {
  const VocabularyShard whole{weight.dim() ? weight.size(0) : 0, 0};
  return gradients(grad, hidden, weight, targets, stats, spans, temperature,
                   {want_hidden, want_weight, of, whole, hidden.scalar_type()});
}

std::tuple<Tensor, Tensor> shard_backward(const Tensor& grad, const Tensor& hidden,
                                          const Tensor& weight, const Tensor& targets,
                                          const Tensor& stats, const Tensor& spans,
                                          double temperature, bool want_hidden, bool want_weight,
                                          int64_t of, int64_t extent, int64_t first) {
  return gradients(grad, hidden, weight, targets, stats, spans, temperature,
                   {want_hidden, want_weight, of, {extent, first}, at::kFloat});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "linear_logprob_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor targets, "
      "Tensor stats, Tensor spans, float temperature, bool want_hidden, bool want_weight, "
      "int of=0) -> (Tensor, Tensor)");
  m.def(
      "linear_logprob_shard_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor targets, "
      "Tensor stats, Tensor spans, float temperature, bool want_hidden, bool want_weight, int of, "
      "int extent, int first) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear_logprob_backward", &logprob_backward);
  m.impl("linear_logprob_shard_backward", &shard_backward);
}

}  // namespace isobit
