// exp(x) for x <= 0, sixteen lanes at a time, as one chain of IEEE operations.
//
// The chain uses products, sums and a shift, each rounded by itself. Every instruction set, and
// torch's elementwise operations in the portable executor of softmax, therefore give the same bits
// for a value, whatever its position in memory. Tests cover all arguments: the error is below 1
// ulp, exp(0) is 1, and a smaller argument never has a larger result. Results below 2^-126 are +0,
// because subnormals are slow and a flush mode could change them where torch computes.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace isobit {

namespace exponential {
constexpr float lowest = -0x1.5d589ep+6f;     // below it exp is under 2^-126
constexpr float per_octave = 0x1.715476p+0f;  // 1 / ln 2
// ln 2 in two parts; n times the first is exact.
constexpr float octave = 0x1.62e4p-1f, octave_rest = 0x1.7f7d1cp-20f;
// Adding it rounds to an integer n, and leaves n's biased exponent in the low bits.
constexpr float to_integer = 0x1.8p+23f + 127.0f;
constexpr float q0 = 0x1.fffffcp-2f, q1 = 0x1.555492p-3f, q2 = 0x1.5558f2p-5f, q3 = 0x1.123a20p-7f,
                q4 = 0x1.6a23ccp-10f;
}  // namespace exponential

// x = e^x, by e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + (r + r² q(r)). A NaN stays NaN.
// With `bounded`, x >= lowest. See [Note: four vectors] in lanes.h.
template <bool bounded = false, class Vector>
ISOBIT_INLINE void exp_nonpositive(Vector& x) {
  using namespace exponential;
  const Vector shifted = x * per_octave + to_integer;
  const Vector n = shifted - to_integer;
  Vector r = x;
  subtract_exact_product(n, octave, r);
  r = r - n * octave_rest;
  const Vector q = (((q4 * r + q3) * r + q2) * r + q1) * r + q0;
  const Vector mantissa = 1.0f + (r + r * r * q);
  Vector power;
  shift_to_exponent(shifted, power);
  power = mantissa * power;
  if constexpr (!bounded) set_where_less(x, lowest, 0.0f, power);
  x = power;
}

}  // namespace isobit
