// Additions and the last rounding of partial sums, for the exchange between ranks: functions of one
// element, in one pass and in the calling thread.
//
// The definition is in parallel/collectives/elementwise_add.py, which compares these kernels with
// it before it uses them.
#include <torch/library.h>
#include <bit>
#include <cstdint>

#include "clones.h"
#include "errors.h"
#include "fp_environment.h"

namespace isobit {

namespace {

using at::Tensor;

// Every NaN becomes the positive quiet one. Integers, so that no compiler orders comparisons.
ISOBIT_INLINE float settled(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
}
ISOBIT_INLINE double settled(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  const bool is_nan = (bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
  return std::bit_cast<double>(is_nan ? uint64_t{0x7ff8000000000000u} : bits);
}

// left, right, total: [count]; total may be left or right.
template <class T>
ISOBIT_INLINE void add_elements(const T* left, const T* right, T* total, int64_t count,
                                bool settle) {
  if (settle)
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) total[i] = settled(left[i] + right[i]);
  else
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) total[i] = left[i] + right[i];
}

#define ISOBIT_ADD(T)                                                                           \
  ISOBIT_CLONES void add(const T* left, const T* right, T* total, int64_t count, bool settle) { \
    add_elements(left, right, total, count, settle);                                            \
  }
ISOBIT_ADD(float)
ISOBIT_ADD(double)

// To nearest, ties to even; total [count] of fp32, rounded [count] of bf16 as its bits.
ISOBIT_CLONES void round_bf16(const uint32_t* total, uint16_t* rounded, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = total[i];
    const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded[i] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest;
  }
}

void check_flat(const Tensor& tensor, const Tensor& like) {
  ISOBIT_CHECK(tensor.device().is_cpu() && tensor.is_contiguous() && tensor.sizes() == like.sizes(),
               "parallel.all_reduce", c10::str("contiguous tensors ", like.sizes(), " on the CPU"),
               c10::str(tensor.sizes(), " on ", tensor.device()),
               "call isobit.parallel.all_reduce");
}

void add_partials(const Tensor& left, const Tensor& right, Tensor& total, bool settle) {
  for (const Tensor& tensor : {left, right, total}) {
    check_flat(tensor, total);
    ISOBIT_CHECK(tensor.scalar_type() == total.scalar_type(), "parallel.all_reduce",
                 "tensors of one dtype", dtype_name(tensor.scalar_type()),
                 "call isobit.parallel.all_reduce");
  }
  total.unsafeGetTensorImpl()->bump_version();
  FixedFpEnvironment fp_environment;
  const int64_t count = total.numel();
  if (total.scalar_type() == at::kFloat)
    add(left.const_data_ptr<float>(), right.const_data_ptr<float>(),
        total.mutable_data_ptr<float>(), count, settle);
  else if (total.scalar_type() == at::kDouble)
    add(left.const_data_ptr<double>(), right.const_data_ptr<double>(),
        total.mutable_data_ptr<double>(), count, settle);
  else
    ISOBIT_CHECK(false, "parallel.all_reduce", "float32 or float64",
                 dtype_name(total.scalar_type()), "pass tensor.float()");
}

void round_partials(const Tensor& total, Tensor& rounded) {
  check_flat(total, rounded);
  check_flat(rounded, rounded);
  ISOBIT_CHECK(
      total.scalar_type() == at::kFloat && rounded.scalar_type() == at::kBFloat16,
      "parallel.all_reduce", "float32, rounded to bfloat16",
      c10::str(dtype_name(total.scalar_type()), " and ", dtype_name(rounded.scalar_type())),
      "call isobit.parallel.all_reduce");
  rounded.unsafeGetTensorImpl()->bump_version();
  round_bf16(static_cast<const uint32_t*>(total.const_data_ptr()),
             static_cast<uint16_t*>(rounded.mutable_data_ptr()), total.numel());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("add_partials(Tensor left, Tensor right, Tensor(a!) total, bool settle) -> ()");
  m.def("round_partials(Tensor total, Tensor(a!) rounded) -> ()");
}
TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("add_partials",
         [](const Tensor& left, const Tensor& right, const Tensor& total, bool settle) {
           Tensor written = total;
           add_partials(left, right, written, settle);
         });
  m.impl("round_partials", [](const Tensor& total, const Tensor& rounded) {
    Tensor written = rounded;
    round_partials(total, written);
  });
}

}  // namespace isobit
