// Allocation of result tensors.
#include "memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

namespace isobit {

at::Tensor empty_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  // torch's deterministic mode may fill new memory, which at::empty does; finding at::empty costs
  // as much as the work on a small tensor.
  at::Tensor out = at::globalContext().deterministicAlgorithms()
                       ? at::empty(shape, at::TensorOptions().dtype(dtype))
                       : at::Tensor(at::detail::empty_cpu(shape, dtype));
  prefer_huge_pages(out.mutable_data_ptr(), out.nbytes());
  return out;
}

}  // namespace isobit
