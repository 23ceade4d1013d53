// The logistic function and the normal distribution, sixteen lanes at a time.
//
// As in exponential.h these are chains of IEEE operations, none fused, so a value has one result at
// every position. The portable executor has the same chains in torch operations.
#pragma once

#include "exponential.h"

namespace isobit {

// Sets e = e^-x and denominator = 1 + e^-x, so that the logistic function is 1 / denominator. The
// chain of exp_nonpositive also serves positive arguments whose scale 2^n is finite.
ISOBIT_INLINE void logistic_denominator(const Floats& x, Floats& e, Floats& denominator) {
  constexpr float highest = 87.25f;  // so that 1 / denominator is not subnormal
  e = -x;
  exp_nonpositive(e);
  e = -x > highest ? Floats{} + infinity : e;
  denominator = e + 1.0f;
}

// Sets s to the logistic function and complement to 1 - s, by a difference only where that is
// accurate.
ISOBIT_INLINE void sigmoid(const Floats& x, Floats& s, Floats& complement) {
  Floats e, denominator;
  logistic_denominator(x, e, denominator);
  s = 1.0f / denominator;
  complement = x >= 0.0f ? e * s : 1.0f - s;
}

namespace normal {
constexpr float farthest = 16.0f;          // the density is +0 there
constexpr float at_zero = 0x1.988454p-2f;  // the density at 0: 1 / sqrt(2 pi)
constexpr float p0 = -0x1.18845ep+2f, p1 = 0x1.4ef932p+2f, p2 = -0x1.98dab8p+1f,
                p3 = 0x1.3e4ffep-2f, p4 = 0x1.496370p-1f, p5 = 0x1.5e7f70p-4f, p6 = -0x1.23a7acp-1f,
                p7 = 0x1.57c3b8p-2f, p8 = -0x1.0439a2p-4f;
}  // namespace normal

// Sets cdf to the standard normal distribution function at x, and density to its derivative. With
// a = |x| the upper tail is e^(-a²/2) t (2 + u p(u)), where t = 1 / (a + 4) and u = a t. This is
// exact at 0; the relative error of the fit is 8.3e-9.
ISOBIT_INLINE void normal_cdf(const Floats& x, Floats& cdf, Floats& density) {
  using namespace normal;
  Floats a = reinterpret_cast<Floats>(reinterpret_cast<Uint32s>(x) & 0x7fffffffu);
  a = a > farthest ? Floats{} + farthest : a;
  Floats e = a * a * -0.5f;
  exp_nonpositive(e);
  const Floats t = 1.0f / (a + 4.0f), u = a * t;
  const Floats p =
      (((((((p8 * u + p7) * u + p6) * u + p5) * u + p4) * u + p3) * u + p2) * u + p1) * u + p0;
  const Floats upper_tail = e * (t * (u * p + 2.0f));
  cdf = x >= 0.0f ? 1.0f - upper_tail : upper_tail;
  density = e * at_zero;
}

}  // namespace isobit
