// The logistic function and the normal distribution, sixteen lanes at a time, over the chain of
// exponential.h.
//
// As there, IEEE operations and none fused, so a value has one result wherever it stands;
// ops/elements/elementary.py is the same in torch.
#pragma once

#include <limits>

#include "exponential.h"

namespace isobit {

// 1 / (1 + e^-x) is 1 / total. The exponential's chain serves positive arguments too, as far as a
// scale is finite.
ISOBIT_INLINE void logistic(const Floats& x, Floats& e, Floats& total) {
  constexpr float highest = 87.25f;  // so that 1 / total is no subnormal
  e = -x;
  exp_nonpositive(e);
  e = -x > highest ? Floats{} + std::numeric_limits<float>::infinity() : e;
  total = e + 1.0f;
}

// The logistic function s, and 1 - s, by a difference only where that rounds no digit away.
ISOBIT_INLINE void sigmoid(const Floats& x, Floats& s, Floats& rest) {
  Floats e, total;
  logistic(x, e, total);
  s = 1.0f / total;
  rest = x >= 0.0f ? e * s : 1.0f - s;
}

namespace normal {
constexpr float farthest = 16.0f;          // the density is +0 there
constexpr float at_zero = 0x1.988454p-2f;  // 1 / sqrt(2 pi)
constexpr float p0 = -0x1.18845ep+2f, p1 = 0x1.4ef932p+2f, p2 = -0x1.98dab8p+1f,
                p3 = 0x1.3e4ffep-2f;
constexpr float p4 = 0x1.496370p-1f, p5 = 0x1.5e7f70p-4f, p6 = -0x1.23a7acp-1f, p7 = 0x1.57c3b8p-2f;
constexpr float p8 = -0x1.0439a2p-4f;
}  // namespace normal

// The share of the standard normal distribution below x, and its density at x. With a = |x| the
// share beyond a is e^(-a²/2) t (2 + u p(u)), where t = 1 / (a + 4) and u = a t: exact at 0; the
// fit's relative error is 8.3e-9.
ISOBIT_INLINE void normal_share(const Floats& x, Floats& share, Floats& density) {
  using namespace normal;
  Floats a = reinterpret_cast<Floats>(reinterpret_cast<Lanes>(x) & 0x7fffffffu);
  a = a > farthest ? Floats{} + farthest : a;
  Floats e = a * a * -0.5f;
  exp_nonpositive(e);
  const Floats t = 1.0f / (a + 4.0f), u = a * t;
  const Floats p =
      (((((((p8 * u + p7) * u + p6) * u + p5) * u + p4) * u + p3) * u + p2) * u + p1) * u + p0;
  const Floats beyond = e * (t * (u * p + 2.0f));
  share = x >= 0.0f ? 1.0f - beyond : beyond;
  density = e * at_zero;
}

}  // namespace isobit
