// Dispatch from a tensor's dtype to a C++ element type.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "errors.h"

namespace isobit {

using at::Tensor;
using c10::BFloat16;
using c10::Half;

// Names an element type in a call: `using T = typename decltype(tag)::type;`.
template <class T>
struct DtypeTag {
  using type = T;
};

// Calls `work(DtypeTag<T>())` with the element type T of `dtype`; `function` is for the error.
template <class Work>
void dispatch_dtype(const char* function, at::ScalarType dtype, const Work& work) {
  if (dtype == at::kFloat)
    work(DtypeTag<float>());
  else if (dtype == at::kBFloat16)
    work(DtypeTag<BFloat16>());
  else if (dtype == at::kHalf)
    work(DtypeTag<Half>());
  else
    ISOBIT_CHECK(false, function, "float32, bfloat16 or float16", dtype_name(dtype),
                 "call the Python function, which has a portable executor for float64");
}

// The same for tensors that enter the tile engine (see engine_dtype in linear.h); returns what
// `work` returns.
template <class Work>
auto dispatch_engine_dtype(at::ScalarType dtype, const Work& work) {
  return dtype == at::kFloat ? work(DtypeTag<float>()) : work(DtypeTag<BFloat16>());
}

}  // namespace isobit
