// fp16 that the processor converts: a conversion in C++ costs twenty instructions instead of one.
//
// A kernel is compiled a second time for HardwareHalf, by ISOBIT_AVX512, and
// dispatch_hardware_dtype chooses it. Both conversions are exact, or rounded to nearest even, so
// the bits are the same.
#pragma once

#include "dtypes.h"
#include "lanes.h"

namespace isobit {

#ifdef ISOBIT_AVX512

struct __attribute__((may_alias)) HardwareHalf {
  uint16_t x;
  HardwareHalf() = default;
  explicit HardwareHalf(float value) : x(Half(value).x) {}
};

// Reads src[16]; see [Note: loading] in lanes.h.
ISOBIT_INLINE void load(const HardwareHalf* src, Floats& values) {
  asm("vcvtph2ps %1, %0" : "=v"(values) : "m"(*reinterpret_cast<const Uint16s*>(src)));
}

// Writes dst[16]; see [Note: the one rounding] in lanes.h. $0: to nearest even.
ISOBIT_INLINE void round_to(const Floats& v, HardwareHalf* dst) {
  const Floats settled = v != v ? Floats{} + __builtin_nanf("") : v;
  asm("vcvtps2ph $0, %1, %0" : "=m"(*reinterpret_cast<Uint16s*>(dst)) : "v"(settled));
}

#endif

// As dispatch_dtype, with HardwareHalf for fp16 where the processor converts it.
template <class Work>
void dispatch_hardware_dtype(const char* function, at::ScalarType dtype, const Work& work) {
#ifdef ISOBIT_AVX512
  if (dtype == at::kHalf && has_avx512()) return work(DtypeTag<HardwareHalf>());
#endif
  dispatch_dtype(function, dtype, work);
}

// The elements of a tensor of a dispatched type. Not owned.
template <class T>
const T* elements(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

}  // namespace isobit
