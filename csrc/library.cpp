// The operator library `isobit`: attestation, build information, and the schedules for tests.
//
// Each operator registers itself in its own file with TORCH_LIBRARY_FRAGMENT.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/library.h>
#include <atomic>

#include "attestation.h"
#include "engine.h"
#include "errors.h"
#include "order.h"

#ifndef ISOBIT_FLAGS
#define ISOBIT_FLAGS "unknown"
#endif

namespace isobit {

namespace {

std::atomic<bool> attested{false};

// For tests that compare the schedule with the definition in Python: one row per leaf,
// (start, length, fold, segment).
at::Tensor schedule_table(const Schedule& schedule) {
  at::Tensor out = at::empty({schedule.leaf_count(), 4}, at::TensorOptions().dtype(at::kLong));
  int64_t* row = out.mutable_data_ptr<int64_t>();  // [leaves][4]
  int64_t segment = 0;
  for (int64_t i = 0; i < schedule.leaf_count(); i++, row += 4) {
    while (i >= schedule.segment_end[segment]) segment++;
    const Leaf& leaf = schedule.leaves[i];
    row[0] = leaf.start;
    row[1] = leaf.length;
    row[2] = leaf.fold;
    row[3] = schedule.first_segment + segment;
  }
  return out;
}

}  // namespace

void check_attested() {
  ISOBIT_CHECK(attested.load(std::memory_order_relaxed), "native", "attested kernels",
               "a call before attestation",
               "call the functions of isobit, which attest the kernels first");
}

// With oneDNN disabled, torch's brgemm silently becomes a stock GEMM with another order.
void check_engine() {
  ISOBIT_CHECK(at::globalContext().userEnabledMkldnn(), "native", "oneDNN to be enabled",
               "torch.backends.mkldnn.flags(enabled=False)", "call isobit outside that context");
  check_attested();
}

TORCH_LIBRARY(isobit, m) {
  m.def("attest(bool kept) -> ()", [](bool kept) { attested = kept; });
  m.def("build_flags() -> str", [] { return std::string(ISOBIT_FLAGS); });
  m.def("pairs_bf16() -> bool", [] { return engine_pairs_bf16(); });
  m.def("feature_schedule(int extent) -> Tensor",
        [](int64_t extent) { return schedule_table(feature_schedule(extent)); });
  m.def("product_schedule(int extent) -> Tensor",
        [](int64_t extent) { return schedule_table(product_schedule(extent)); });
  m.def("sample_schedule(Tensor spans, int first, int of) -> Tensor",
        [](const at::Tensor& spans, int64_t first, int64_t of) {
          return schedule_table(
              sample_schedule(spans.const_data_ptr<int64_t>(), spans.size(0), first, of));
        });
}

}  // namespace isobit
