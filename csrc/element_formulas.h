// SiLU, GELU and SwiGLU, and their gradients, of one vector each.
//
// Each formula is a struct with `inputs` and `outputs` (numbers of tensors) and
// apply(in, out): in [inputs] and out [outputs] vectors, of sixteen elements or of four times as
// many (see [Note: four vectors] in lanes.h). Where every input is nearer to 0 than its number in
// `bounds`, apply<true> has the same bits as apply<false>, and no result is NaN (see
// [Note: bounded arguments] in elementary.h).
#pragma once

#include "elementary.h"

namespace isobit {

constexpr float logistic_bound = 87.0f;  // e^x and e^-x are normal numbers
constexpr float normal_bound = 13.0f;    // and so is e^(-x²/2)
constexpr float tanh_bound = 9.5f;       // the logistic function's argument is below 77

struct Silu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static constexpr float bounds[] = {logistic_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector e, denominator;
    logistic_denominator<bounded>(x[0], e, denominator);
    y[0] = x[0] / denominator;
  }
};

// Sets s to the logistic function of x, and derivative to that of silu.
template <bool bounded, class Vector>
ISOBIT_INLINE void silu_derivative(const Vector& x, Vector& s, Vector& derivative) {
  Vector complement;
  sigmoid<bounded>(x, s, complement);
  derivative = s * (x * complement + 1.0f);
}

struct SiluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  static constexpr float bounds[] = {infinity, logistic_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    Vector s, derivative;
    silu_derivative<bounded>(in[1], s, derivative);
    dx[0] = in[0] * derivative;
  }
};

struct Gelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static constexpr float bounds[] = {normal_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector cdf, density;
    normal_cdf<bounded>(x[0], cdf, density);
    y[0] = x[0] * cdf;
  }
};

struct GeluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  static constexpr float bounds[] = {infinity, normal_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    Vector cdf, density;
    normal_cdf<bounded>(in[1], cdf, density);
    dx[0] = in[0] * (in[1] * density + cdf);
  }
};

// The tanh form of GELU is x times the logistic function of x (k + k' x²). This is that argument
// and its derivative, for x clamped so that no power overflows.
template <bool bounded, class Vector>
struct TanhArgument {
  Vector clamped, value, derivative;
  ISOBIT_INLINE explicit TanhArgument(const Vector& x) {
    constexpr float bound = 32.0f;  // beyond it the logistic function is 0 or 1
    constexpr float linear = 0x1.988454p+0f, cubic = 0x1.2444f2p-4f,
                    cubic_derivative = 0x1.b6676cp-3f;
    clamped = x;
    if constexpr (!bounded) {
      set_where_greater(x, bound, bound, clamped);
      set_where_less(x, -bound, -bound, clamped);
    }
    const Vector square = clamped * clamped;
    value = clamped * (square * cubic + linear);
    derivative = square * cubic_derivative + linear;
  }
};

struct TanhGelu {
  static constexpr int64_t inputs = 1, outputs = 1;
  static constexpr float bounds[] = {tanh_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* x, Vector* y) {
    Vector e, denominator;
    logistic_denominator<bounded>(TanhArgument<bounded, Vector>(x[0]).value, e, denominator);
    y[0] = x[0] / denominator;
  }
};

struct TanhGeluBackward {  // of (gradient, x)
  static constexpr int64_t inputs = 2, outputs = 1;
  static constexpr float bounds[] = {infinity, tanh_bound};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* dx) {
    const TanhArgument<bounded, Vector> argument(in[1]);
    Vector s, complement;
    sigmoid<bounded>(argument.value, s, complement);
    dx[0] = in[0] * (s * (argument.clamped * (complement * argument.derivative) + 1.0f));
  }
};

struct Swiglu {  // of (gate, up)
  static constexpr int64_t inputs = 2, outputs = 1;
  static constexpr float bounds[] = {logistic_bound, infinity};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* y) {
    Silu::apply<bounded>(in, y);
    y[0] = y[0] * in[1];
  }
};

struct SwigluBackward {  // of (gradient, gate, up), to (dgate, dup)
  static constexpr int64_t inputs = 3, outputs = 2;
  static constexpr float bounds[] = {0x1p60f, logistic_bound, 0x1p60f};
  template <bool bounded, class Vector>
  static ISOBIT_INLINE void apply(const Vector* in, Vector* out) {
    Vector s, derivative;
    silu_derivative<bounded>(in[1], s, derivative);
    out[0] = in[0] * in[2] * derivative;
    out[1] = in[0] * (in[1] * s);
  }
};

}  // namespace isobit
