// The logistic function, tanh and the normal distribution, sixteen lanes at a time.
//
// As in exponential.h these are chains of IEEE operations, each rounded by itself, so a value has
// one result at every position. The portable executor has the same chains in torch operations.
//
// [Note: bounded arguments] Far arguments and NaN are set by comparisons, which cost a sixth of a
// chain. With `bounded` they are left out: the caller knows that none of them would act.
#pragma once

#include "exponential.h"

namespace isobit {

// Sets e = e^-x and denominator = 1 + e^-x, so that the logistic function is 1 / denominator. The
// chain of exp_nonpositive also serves positive arguments whose scale 2^n is finite.
template <bool bounded, class Vector>
ISOBIT_INLINE void logistic_denominator(const Vector& x, Vector& e, Vector& denominator) {
  constexpr float highest = 87.25f;  // so that 1 / denominator is not subnormal
  negate(x, e);
  const Vector negated = e;
  exp_nonpositive<bounded>(e);
  if constexpr (!bounded) set_where_greater(negated, highest, infinity, e);
  denominator = e + 1.0f;
}

// Sets s to the logistic function and complement to 1 - s, by a difference only where that is
// accurate.
template <bool bounded, class Vector>
ISOBIT_INLINE void sigmoid(const Vector& x, Vector& s, Vector& complement) {
  Vector e, denominator;
  logistic_denominator<bounded>(x, e, denominator);
  s = 1.0f / denominator;
  complement = 1.0f - s;
  const Vector product = e * s;
  set_where_positive(x, product, complement);
}

namespace hyperbolic {
constexpr float near = 0.625f;
constexpr float p0 = -3.33332819422e-1f, p1 = 1.33314422036e-1f, p2 = -5.37397155531e-2f,
                p3 = 2.06390887954e-2f, p4 = -5.70498872745e-3f;
}  // namespace hyperbolic

// Sets t to tanh x: x + x³ p(x²) where |x| < 0.625, else 1 − 2e / (1 + e) with e = e^(−2|x|) and
// the sign of x. A NaN stays NaN.
ISOBIT_INLINE void tanh(const Floats& x, Floats& t) {
  using namespace hyperbolic;
  Floats size;
  absolute(x, size);
  Floats e = size * -2.0f;
  exp_nonpositive(e);
  const Floats far = 1.0f - (e + e) / (e + 1.0f), square = size * size;
  const Floats p = (((p4 * square + p3) * square + p2) * square + p1) * square + p0;
  const Floats chosen = size < near ? p * square * size + size : far;
  t = reinterpret_cast<Floats>((reinterpret_cast<Uint32s>(chosen) & 0x7fffffffu) |
                               (reinterpret_cast<Uint32s>(x) & 0x80000000u));
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
template <bool bounded, class Vector>
ISOBIT_INLINE void normal_cdf(const Vector& x, Vector& cdf, Vector& density) {
  using namespace normal;
  Vector a;
  absolute(x, a);
  const Vector magnitude = a;
  if constexpr (!bounded) set_where_greater(magnitude, farthest, farthest, a);
  Vector e = a * a * -0.5f;
  exp_nonpositive<bounded>(e);
  const Vector t = 1.0f / (a + 4.0f), u = a * t;
  const Vector p =
      (((((((p8 * u + p7) * u + p6) * u + p5) * u + p4) * u + p3) * u + p2) * u + p1) * u + p0;
  cdf = e * (t * (u * p + 2.0f));  // the upper tail
  const Vector lower = 1.0f - cdf;
  set_where_positive(x, lower, cdf);
  density = e * at_zero;
}

}  // namespace isobit
