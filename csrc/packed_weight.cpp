// Packs weights for the tile engine, and watches whether a weight was written after that.
//
// [Note: watching a weight] A packed form must not be used once the weight has changed.
// `share_memory` makes the weight's storage copy-on-write and returns a tensor that shares it:
// every request for mutable memory, by whatever code, then moves the weight to other memory, and
// leaves what was packed as it is.
#include "packed_weight.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>
#include <optional>
#include <thread>

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

// Another thread that writes first gives the storage other memory, and then marks it as plain.
// Returns whether that is over, after waiting for it.
bool is_settled(const c10::StorageImpl& storage) {
  for (int attempt = 0; attempt < 10000; attempt++) {
    if (!storage.has_materializer() || c10::impl::cow::is_cow_data_ptr(storage.data_ptr()))
      return true;
    std::this_thread::yield();
  }
  return false;
}

// Returns a lazy clone of a storage; null if torch cannot see writes to its memory.
c10::intrusive_ptr<c10::StorageImpl> clone_lazily(c10::StorageImpl& storage) {
  using c10::impl::cow::is_cow_data_ptr;
  // Storages that torch.load makes have no allocator, and torch would call it at the first write.
  // Their memory is that of the CPU allocator, unless a context says otherwise.
  if (!storage.allocator() && c10::impl::cow::has_simple_data_ptr(storage))
    storage.set_allocator(c10::GetCPUAllocator());
  if (!storage.allocator() || !is_settled(storage)) return nullptr;
  // What another thread's write has left may be half of the marks of a copy-on-write storage.
  if (is_cow_data_ptr(storage.data_ptr()) && !storage.has_materializer())
    storage.set_materializer(&c10::impl::cow::materialize_cow);
  c10::intrusive_ptr<c10::StorageImpl> clone;
  try {
    clone = c10::impl::cow::lazy_clone_storage(storage);
  } catch (const c10::Error&) {  // a write began since is_settled
    return nullptr;
  }
  storage.clear_data_ptr_access_error_msg_();  // computes the marks again; there is no such message
  return clone;
}

// Returns a tensor of the weight's memory, which stays as it is when the weight is written. None if
// the storage has more than `owners`, or if torch does not own the memory (shared, mapped or
// foreign), so that writes to it could not be seen.
std::optional<Tensor> share_memory(const Tensor& weight, int64_t owners) {
  if (!weight.device().is_cpu() || weight.storage().use_count() > static_cast<size_t>(owners))
    return std::nullopt;
  c10::intrusive_ptr<c10::StorageImpl> storage =
      clone_lazily(*weight.storage().unsafeGetStorageImpl());
  if (!storage) return std::nullopt;
  c10::InferenceMode inference(false);
  Tensor shared = empty_tensor({0}, weight.scalar_type());
  c10::TensorImpl* impl = shared.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
  impl->set_sizes_and_strides(weight.sizes(), weight.strides(), weight.storage_offset());
  return shared;
}

int64_t count_owners(const Tensor& weight) { return weight.storage().use_count(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("share_memory(Tensor weight, int owners) -> Tensor?", &share_memory);
  m.def("count_owners(Tensor weight) -> int", &count_owners);
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) { m.impl("pack_weight", &pack_weight_op); }

}  // namespace isobit
