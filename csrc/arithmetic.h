// Fixes what a thread's control register could change: rounding to nearest, subnormals kept.
//
// torch.set_flush_denormal sets the flag on the calling thread only, so results would depend on
// which thread ran.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace isobit {

class PlainArithmetic {
#if defined(__x86_64__)
 public:
  PlainArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainArithmetic() { _mm_setcsr(before_); }
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;

 private:
  unsigned before_;
#endif
};

}  // namespace isobit
