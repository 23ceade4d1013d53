// log(x) for x >= 2^-126, sixteen lanes at a time, as one chain of IEEE operations.
//
// As in exponential.h, nothing is fused, so torch's elementwise operations in the portable executor
// give the same bits.
#pragma once

#include "lanes.h"

namespace isobit {

namespace logarithm {
constexpr float root_half = 0x1.6a09e6p-1f;  // √½
// ln 2 in two parts; n times the first is exact.
constexpr float octave = 0x1.63p-1f, octave_rest = -0x1.bd0106p-13f;
constexpr float p0 = 7.0376836292e-2f, p1 = -1.1514610310e-1f, p2 = 1.1676998740e-1f,
                p3 = -1.2420140846e-1f, p4 = 1.4249322787e-1f, p5 = -1.6668057665e-1f,
                p6 = 2.0000714765e-1f, p7 = -2.4999993993e-1f, p8 = 3.3333331174e-1f;
}  // namespace logarithm

// x = log x, by x = 2^n m with √½ <= m < √2, and log m = f - f²/2 + f³ p(f), f = m - 1.
// A NaN stays NaN, and +inf stays +inf.
ISOBIT_INLINE void log_positive(Floats& x) {
  using namespace logarithm;
  const Uint32s bits = reinterpret_cast<Uint32s>(x);
  const Floats m = reinterpret_cast<Floats>((bits & 0x007fffffu) | 0x3f000000u);  // in [½, 1)
  const auto small = m < root_half;
  const Floats exponent =
      __builtin_convertvector(reinterpret_cast<Int32s>((bits >> 23) - 126u), Floats);
  const Floats n = small ? exponent - 1.0f : exponent;
  const Floats f = (small ? m + m : m) - 1.0f;
  const Floats z = f * f;
  Floats p = p0 * f + p1;
  p = p * f + p2;
  p = p * f + p3;
  p = p * f + p4;
  p = p * f + p5;
  p = p * f + p6;
  p = p * f + p7;
  p = p * f + p8;
  const Floats rest = ((p * f) * z + n * octave_rest) - 0.5f * z;
  const Floats result = (f + rest) + n * octave;
  x = x - x == Floats{} ? result : x;
}

}  // namespace isobit
