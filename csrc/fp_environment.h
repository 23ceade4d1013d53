// The floating-point environment of a thread: round to nearest, keep subnormals.
//
// torch.set_flush_denormal changes the control register of the calling thread only. Without this
// guard, results would depend on which thread computed them.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace isobit {

// Sets the default floating-point environment for the lifetime of the object. Every function that
// is passed to at::parallel_for and computes with floats creates one first.
class FixedFpEnvironment {
#if defined(__x86_64__)
 public:
  FixedFpEnvironment() : saved_mxcsr_(_mm_getcsr()) {
    _mm_setcsr(
        0x1f80);  // the power-on value: round to nearest, exceptions masked, no flush to zero
  }
  ~FixedFpEnvironment() { _mm_setcsr(saved_mxcsr_); }
  FixedFpEnvironment(const FixedFpEnvironment&) = delete;
  FixedFpEnvironment& operator=(const FixedFpEnvironment&) = delete;

 private:
  unsigned saved_mxcsr_;
#endif
};

}  // namespace isobit
