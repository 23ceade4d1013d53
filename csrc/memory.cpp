// Allocation of result tensors.
#include "memory.h"

#include <ATen/ops/empty.h>

namespace isobit {

at::Tensor empty_tensor(at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(dtype));
  prefer_huge_pages(out.mutable_data_ptr(), out.nbytes());
  return out;
}

}  // namespace isobit
