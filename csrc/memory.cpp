// Memory for results.
#include "memory.h"

#include <ATen/ops/empty.h>

namespace isobit {

at::Tensor empty_tensor(at::IntArrayRef shape, at::ScalarType type) {
  at::Tensor out = at::empty(shape, at::TensorOptions().dtype(type));
  prefer_huge_pages(out.mutable_data_ptr(), out.nbytes());
  return out;
}

}  // namespace isobit
