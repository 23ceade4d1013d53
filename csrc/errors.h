// Argument checks of the native operators, with messages in the form of isobit.errors.
//
// The Python functions check their arguments before they call an operator, and their messages say
// more. The checks here protect memory against direct calls of torch.ops.isobit.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <string>

namespace isobit {

// Raises a RuntimeError with three lines: the public function and expected, received, remedy.
// `expected`, `received` and `remedy` are evaluated only if the condition is false.
#define ISOBIT_CHECK(condition, function, expected, received, remedy)                              \
  TORCH_CHECK(condition, "isobit.", function, ": expected ", expected, "\n  received: ", received, \
              "\n  remedy: ", remedy)

// As ISOBIT_CHECK, but raises an IndexError.
#define ISOBIT_CHECK_INDEX(condition, function, expected, received, remedy)  \
  TORCH_CHECK_INDEX(condition, "isobit.", function, ": expected ", expected, \
                    "\n  received: ", received, "\n  remedy: ", remedy)

inline const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    default:
      return c10::toString(type);
  }
}

// For messages: "float32 [2, 3]", and "not contiguous" where that is so.
inline std::string describe(const at::Tensor& t) {
  return c10::str(dtype_name(t.scalar_type()), " ", t.sizes(),
                  t.is_contiguous() ? "" : " (not contiguous)");
}

}  // namespace isobit
