// Packs weights for the tile engine, and watches whether a weight was written after that.
//
// [Note: watching a weight] A packed form must not be used once the weight has changed. `watch`
// makes the weight's storage copy-on-write: every request for mutable memory, by whatever code,
// then ends that state. So the weight is clean exactly as long as its storage is copy-on-write.
#include "packed_weight.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>

#include "attestation.h"
#include "dtypes.h"
#include "engine.h"
#include "memory.h"
#include "panels.h"
#include "sums.h"

namespace isobit {

Tensor pack_weight(const Tensor& weight) {
  const Tensor w = weight.to(engine_dtype(weight.scalar_type()));
  const Schedule schedule = product_schedule(w.size(1));
  const int64_t columns = w.size(0), panels = (columns + panel_width - 1) / panel_width;
  return dispatch_engine_dtype(w.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const PackedLeaves<T> packed(schedule);
    const Operand<T> operand(MatrixView<T>{w.const_data_ptr<T>(), w.stride(0), w.stride(1)});
    Tensor out = empty_tensor({panels, packed.length, panel_width}, w.scalar_type());
    T* data = out.mutable_data_ptr<T>();  // [panels][packed length][panel_width]
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      pack_panels(operand, schedule, packed, {begin, end, panel_width, columns},
                  data + begin * packed.length * panel_width);
    });
    return out;
  });
}

bool has_clean_memory(const Tensor& weight) {
  return c10::impl::cow::is_cow_data_ptr(weight.storage().data_ptr());
}

namespace {

Tensor pack_weight_op(const Tensor& weight) {
  check_engine();
  ISOBIT_CHECK(weight.dim() == 2, "linear", "a weight [N, K]", describe(weight),
               "call isobit.linear or isobit.freeze");
  return pack_weight(weight);
}

// Returns false if torch does not own the memory (shared, mapped or foreign): writes to it could
// not be detected.
bool watch(const Tensor& weight) {
  return c10::impl::cow::lazy_clone_storage(*weight.storage().unsafeGetStorageImpl()) != nullptr;
}

int64_t count_owners(const Tensor& weight) { return weight.storage().use_count(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("watch(Tensor weight) -> bool", &watch);
  m.def("count_owners(Tensor weight) -> int", &count_owners);
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("pack_weight", &pack_weight_op); }

}  // namespace isobit
