// exp of what is not positive, sixteen lanes at a time: one chain of IEEE operations, so one value
// has one result.
//
// The chain is products, sums and a shift, none of them fused: every ISA, and torch's elementwise
// operations in ops/softmax/portable.py, give the same bits, wherever a value stands. Tests walk
// all arguments: the error is under 1 ulp, exp(0) is 1, and a smaller argument never has the larger
// result. Results below 2^-126 are +0, since subnormals are slow, and a flush mode could reach them
// where torch computes.
#pragma once

#include <cstdint>

#include "layout.h"

namespace isobit {

namespace exponential {
constexpr float lowest = -0x1.5d589ep+6f;     // below it exp is under 2^-126
constexpr float per_octave = 0x1.715476p+0f;  // 1 / ln 2
constexpr float octave = 0x1.62e4p-1f,
                octave_rest = 0x1.7f7d1cp-20f;  // ln 2 in two parts; n times the first is exact
constexpr float to_integer =
    0x1.8p+23f + 127.0f;  // rounds to an integer n; the low bits are n's exponent, biased
constexpr float q0 = 0x1.fffffcp-2f, q1 = 0x1.555492p-3f, q2 = 0x1.5558f2p-5f, q3 = 0x1.123a20p-7f,
                q4 = 0x1.6a23ccp-10f;
}  // namespace exponential

// e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + (r + r² q(r)). A NaN stays one.
ISOBIT_INLINE void exp_nonpositive(Floats& x) {
  using namespace exponential;
  const Floats shifted = x * per_octave + to_integer;
  const Floats n = shifted - to_integer;
  const Floats r = (x - n * octave) - n * octave_rest;
  const Floats q = (((q4 * r + q3) * r + q2) * r + q1) * r + q0;
  const Floats mantissa = 1.0f + (r + r * r * q);
  x = x < lowest ? Floats{}
                 : mantissa * reinterpret_cast<Floats>(reinterpret_cast<Lanes>(shifted) << 23);
}

}  // namespace isobit
