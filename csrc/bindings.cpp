// Registers the linear layer and softmax with torch's dispatcher, and holds whether the kernels are
// attested.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/native/CPUBlas.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>
#include <atomic>

#include "attested.h"
#include "linear.h"
#include "samples.h"
#include "softmax.h"

#ifndef ISOBIT_FLAGS
#define ISOBIT_FLAGS "unknown"
#endif

namespace isobit {

static std::atomic<bool> attested{false};

void check_attested() {
  TORCH_CHECK(attested.load(std::memory_order_relaxed),
              "isobit: expected attested kernels, received a call before attestation; remedy: "
              "isobit.native.load()");
}

// With oneDNN switched off, torch's tile engine silently becomes a stock GEMM, with a stock order.
void check_engine() {
  TORCH_CHECK(
      at::globalContext().userEnabledMkldnn(),
      "isobit: expected oneDNN to be enabled, received torch.backends.mkldnn.flags(enabled=False); "
      "remedy: call isobit outside that context");
  check_attested();
}

namespace {

using Optional = std::optional<Tensor>;

// isobit.linear says this better, and first; here it guards memory against direct calls of the
// operators.
void check_shapes(const Tensor& left, int64_t left_size, int64_t right_size) {
  TORCH_CHECK(left.dim() >= 1 && left_size == right_size,
              "isobit: expected the summed axes to agree, received ", left_size, " and ",
              right_size, "; remedy: call isobit.linear, which says which");
}

at::IntArrayRef leading(const Tensor& t) { return t.sizes().slice(0, t.dim() - 1); }

// A weight is clean while nothing has asked for its memory to write: copy-on-write storage says so,
// whoever asks.
bool has_clean_memory(const Tensor& weight) {
  return c10::impl::cow::is_cow_data_ptr(weight.storage().data_ptr());
}

bool is_clean(const Tensor& weight, const Tensor& watched) {
  return weight.storage().unsafeGetStorageImpl() == watched.storage().unsafeGetStorageImpl() &&
         has_clean_memory(weight);
}

// False where the memory is not torch's own (shared, mapped, foreign): its writes could not be
// seen.
bool watch(const Tensor& weight) {
  return c10::impl::cow::lazy_clone_storage(*weight.storage().unsafeGetStorageImpl()) != nullptr;
}

Tensor linear_op(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& spans,
                 const Optional& packed, int64_t of) {
  (void)spans, (void)of;  // for the gradient
  check_engine();
  check_shapes(x, x.size(-1), weight.size(-1));
  return linear(x, weight, bias, packed && has_clean_memory(weight) ? packed : Optional(),
                {x.size(-1), 0, false});
}

Tensor linear_roots_op(const Tensor& x, const Tensor& weight, int64_t extent, int64_t first) {
  check_engine();
  check_shapes(x, x.size(-1), weight.size(-1));
  return linear(x, weight, {}, {}, {extent, first, true});
}

Tensor input_grad_op(const Tensor& grad, const Tensor& weight) {
  check_engine();
  check_shapes(grad, grad.size(-1), weight.size(0));
  return input_grad(grad, weight, {weight.size(0), 0, false});
}

Tensor input_grad_roots_op(const Tensor& grad, const Tensor& weight, int64_t extent,
                           int64_t first) {
  check_engine();
  check_shapes(grad, grad.size(-1), weight.size(0));
  return input_grad(grad, weight, {extent, first, true});
}

// The rows of all weights, which belong to the gradients.
int64_t check_group(at::TensorList grads, at::TensorList weights, int64_t groups) {
  check_engine();
  int64_t rows = 0;
  bool good = grads.size() == weights.size() && !grads.empty() && groups > 0;
  for (size_t i = 0; good && i < grads.size(); i++)
    good = grads[i].dim() >= 1 && weights[i].dim() == 2 &&
           grads[i].size(-1) == weights[i].size(0) && weights[i].size(0) % groups == 0 &&
           weights[i].size(0) > 0 && weights[i].size(1) == weights[0].size(1) &&
           grads[i].sizes().slice(0, grads[i].dim() - 1) ==
               grads[0].sizes().slice(0, grads[0].dim() - 1);
  TORCH_CHECK(good,
              "isobit: expected gradients and weights that belong together; remedy: call "
              "isobit.linear_group");
  for (const Tensor& weight : weights) rows += weight.size(0);
  return rows;
}

Tensor group_input_grad_op(at::TensorList grads, at::TensorList weights, int64_t groups) {
  return group_input_grad(grads, weights, groups, {check_group(grads, weights, groups), 0, false});
}

Tensor group_input_grad_roots_op(at::TensorList grads, at::TensorList weights, int64_t groups,
                                 int64_t extent, int64_t first) {
  check_group(grads, weights, groups);
  return group_input_grad(grads, weights, groups, {extent, first, true});
}

// The one root of a share; the whole is rounded already.
Tensor only_root(const Tensor& out, const Batch& batch) {
  return batch.is_share() ? out.select(0, 0) : out;
}

Tensor weight_grad_op(const Tensor& grad, const Tensor& x, const Optional& spans, int64_t of) {
  check_engine();
  const Tensor described = spans_of(spans, leading(grad));
  check_spans(described, c10::multiply_integers(leading(x)));
  const Batch batch = batch_of(described, of);
  return only_root(weight_grad(grad, x, described, {batch.of, 0, batch.is_share()}), batch);
}

Tensor weight_grad_roots_op(const Tensor& grad, const Tensor& x, const Tensor& spans, int64_t first,
                            int64_t of) {
  check_engine();
  check_spans(spans, c10::multiply_integers(leading(grad)));
  check_spans(spans, c10::multiply_integers(leading(x)));
  return weight_grad(grad, x, spans, {of, first, true});
}

Tensor bias_grad_op(const Tensor& grad, const Optional& spans, int64_t of) {
  check_engine();
  const Tensor described = spans_of(spans, leading(grad));
  const Batch batch = batch_of(described, of);
  return only_root(bias_grad(grad, described, {batch.of, 0, batch.is_share()}), batch);
}

Tensor bias_grad_roots_op(const Tensor& grad, const Tensor& spans, int64_t first, int64_t of) {
  check_engine();
  check_spans(spans, c10::multiply_integers(leading(grad)));
  return bias_grad(grad, spans, {of, first, true});
}

Tensor pack_op(const Tensor& weight) {
  check_engine();
  return pack_weight(weight);
}

// Softmax has no part in the tile engine, so oneDNN may be off.
Tensor softmax_op(const Tensor& x) {
  check_attested();
  TORCH_CHECK(
      x.dim() >= 1,
      "isobit: expected an axis to sum over, received a scalar; remedy: call isobit.softmax");
  return softmax(x);
}

Tensor softmax_backward_op(const Tensor& grad, const Tensor& y) {
  check_attested();
  TORCH_CHECK(y.dim() >= 1 && grad.sizes() == y.sizes() && grad.scalar_type() == y.scalar_type(),
              "isobit: expected a gradient like the output, received ", grad.sizes(), " ",
              grad.scalar_type(), " and ", y.sizes(), " ", y.scalar_type(),
              "; remedy: call isobit.softmax, and let autograd call this");
  return softmax_backward(grad, y);
}

// Rows (start, length, fold, segment), for the tests that hold this plan equal to order/.
Tensor table(const Schedule& schedule) {
  Tensor out = at::empty({static_cast<int64_t>(schedule.leaves.size()), 4},
                         at::TensorOptions().dtype(at::kLong));
  int64_t* row = out.mutable_data_ptr<int64_t>();
  size_t segment = 0;
  for (size_t i = 0; i < schedule.leaves.size(); i++, row += 4) {
    while (static_cast<int64_t>(i) >= schedule.segment_end[segment]) segment++;
    const Leaf& leaf = schedule.leaves[i];
    row[0] = leaf.start, row[1] = leaf.length, row[2] = leaf.fold;
    row[3] = schedule.first + static_cast<int64_t>(segment);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(isobit, m) {
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? spans, Tensor? packed, int of=0) -> "
      "Tensor");
  m.def("linear_input_grad(Tensor grad, Tensor weight) -> Tensor");
  m.def("linear_group_input_grad(Tensor[] grads, Tensor[] weights, int groups) -> Tensor");
  m.def("linear_weight_grad(Tensor grad, Tensor x, Tensor? spans, int of=0) -> Tensor");
  m.def("linear_bias_grad(Tensor grad, Tensor? spans, int of=0) -> Tensor");
  m.def("linear_roots(Tensor x, Tensor weight, int extent, int first) -> Tensor");
  m.def("linear_input_grad_roots(Tensor grad, Tensor weight, int extent, int first) -> Tensor");
  m.def(
      "linear_group_input_grad_roots(Tensor[] grads, Tensor[] weights, int groups, int extent, int "
      "first) -> Tensor");
  m.def(
      "linear_weight_grad_roots(Tensor grad, Tensor x, Tensor spans, int first, int of) -> Tensor");
  m.def("linear_bias_grad_roots(Tensor grad, Tensor spans, int first, int of) -> Tensor");
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("softmax(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor grad, Tensor y) -> Tensor");
  m.def("watch(Tensor weight) -> bool", &watch);
  m.def("is_clean(Tensor weight, Tensor watched) -> bool", &is_clean);
  m.def("count_owners(Tensor weight) -> int",
        [](const Tensor& weight) -> int64_t { return weight.storage().use_count(); });
  m.def("attest(bool kept) -> ()", [](bool kept) { attested = kept; });
  m.def("build_flags() -> str", [] { return std::string(ISOBIT_FLAGS); });
  m.def("pairs_bf16() -> bool", [] { return tile_engine_pairs_bf16(); });
  m.def("feature_schedule(int extent) -> Tensor", [](int64_t extent) {
    return table(feature_schedule(extent, 0, count_segments(extent, feature_unit, feature_cap)));
  });
  m.def("sample_schedule(Tensor spans, int first, int of) -> Tensor",
        [](const Tensor& spans, int64_t first, int64_t of) {
          return table(sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), first, of));
        });
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear", &linear_op);
  m.impl("linear_input_grad", &input_grad_op);
  m.impl("linear_group_input_grad", &group_input_grad_op);
  m.impl("linear_weight_grad", &weight_grad_op);
  m.impl("linear_bias_grad", &bias_grad_op);
  m.impl("linear_roots", &linear_roots_op);
  m.impl("linear_input_grad_roots", &input_grad_roots_op);
  m.impl("linear_group_input_grad_roots", &group_input_grad_roots_op);
  m.impl("linear_weight_grad_roots", &weight_grad_roots_op);
  m.impl("linear_bias_grad_roots", &bias_grad_roots_op);
  m.impl("pack_weight", &pack_op);
  m.impl("softmax", &softmax_op);
  m.impl("softmax_backward", &softmax_backward_op);
}

}  // namespace isobit
