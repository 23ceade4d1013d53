// Rotary position embedding and its gradient: every head of a token is turned by that token's
// angles.
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attested.h"
#include "rows.h"

namespace isobit {

namespace {

// Of one token: cosines and sines for the first half of a head, and for the second. The way back
// has the sines exchanged and negated, which is exact.
struct Turn {
  const float *cos_low, *cos_high, *sin_low, *sin_high;
  float sign;
};

template <class T>
ISOBIT_INLINE void turn_some(const Turn& turn, const T* x, int64_t half, int64_t at, int64_t count,
                             T* out) {
  Floats low, high, cos_low, cos_high, sin_low, sin_high;
  widen_some(x + at, count, 0.0f, low);
  widen_some(x + half + at, count, 0.0f, high);
  widen_some(turn.cos_low + at, count, 0.0f, cos_low);
  widen_some(turn.cos_high + at, count, 0.0f, cos_high);
  widen_some(turn.sin_low + at, count, 0.0f, sin_low);
  widen_some(turn.sin_high + at, count, 0.0f, sin_high);
  round_some(low * cos_low - high * (sin_low * turn.sign), count, out + at);
  round_some(high * cos_high + low * (sin_high * turn.sign), count, out + half + at);
}

template <class T>
ISOBIT_INLINE void turn_all(Turn turn, const T* x, int64_t stride, int64_t heads, int64_t half,
                            T* out) {
  for (int64_t head = 0; head < heads; head++, x += stride, out += 2 * half) {
    int64_t at = 0;
    for (; at + lane_count <= half; at += lane_count) turn_some(turn, x, half, at, lane_count, out);
    if (at < half) turn_some(turn, x, half, at, half - at, out);
  }
}

#define ISOBIT_TURN(T)                                                                       \
  ISOBIT_CLONES void turn_heads(const Turn& turn, const T* x, int64_t stride, int64_t heads, \
                                int64_t half, T* __restrict out) {                           \
    turn_all(turn, x, stride, heads, half, out);                                             \
  }
ISOBIT_TURN(float)
ISOBIT_TURN(BFloat16)
ISOBIT_TURN(Half)

// Where token `index` of the leading axes begins.
int64_t offset_of(const Tensor& t, at::IntArrayRef leading, int64_t index) {
  int64_t offset = 0;
  for (int64_t axis = leading.size(); axis-- > 0; index /= leading[axis])
    offset += index % leading[axis] * t.stride(axis);
  return offset;
}

Tensor last_together(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin, at::IntArrayRef shape) {
  TORCH_CHECK(cos.dim() >= 1 && cos.size(-1) == shape.back() &&
                  at::is_expandable_to(cos.sizes(), shape) && sin.sizes() == cos.sizes() &&
                  sin.scalar_type() == cos.scalar_type() && shape.back() % 2 == 0 &&
                  (cos.scalar_type() == at::kFloat || cos.scalar_type() == x.scalar_type()),
              "isobit: expected cos and sin of ", shape, " with an even last axis, received ",
              cos.sizes(), " and ", sin.sizes(), "; remedy: call isobit.rotary, which says which");
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool back) {
  check_attested();
  TORCH_CHECK(x.dim() >= 2, "isobit: expected x of [..., heads, D], received ", x.sizes(),
              "; remedy: call isobit.rotary, which says more");
  const at::IntArrayRef leading = x.sizes().slice(0, x.dim() - 2);
  std::vector<int64_t> shape = leading.vec();
  shape.push_back(x.size(-1));
  check_angles(x, cos, sin, shape);
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor from = last_together(x);
  // To fp32 and together before they are expanded, so that what is shared is not copied.
  const Tensor cosines = last_together(cos.to(at::kFloat)).expand(shape);
  const Tensor sines = last_together(sin.to(at::kFloat)).expand(shape);
  const int64_t heads = x.size(-2), half = x.size(-1) / 2, size = heads * 2 * half;
  by_type(x, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* data = from.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const float *c = cosines.const_data_ptr<float>(), *s = sines.const_data_ptr<float>();
    at::parallel_for(0, x.numel() / size, std::max<int64_t>(grain / size, 1),
                     [&](int64_t begin, int64_t end) {
                       PlainArithmetic plain;
                       for (int64_t token = begin; token < end; token++) {
                         const float* cosine = c + offset_of(cosines, leading, token);
                         const float* sine = s + offset_of(sines, leading, token);
                         const Turn there{cosine, cosine + half, sine, sine + half, 1.0f};
                         const Turn way_back{cosine, cosine + half, sine + half, sine, -1.0f};
                         const Turn& turn = back ? way_back : there;
                         turn_heads(turn, data + offset_of(from, leading, token), from.stride(-2),
                                    heads, half, to + token * size);
                       }
                     });
  });
  return out;
}

Tensor rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  return rotate(x, cos, sin, false);
}
Tensor rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin) {
  return rotate(grad, cos, sin, true);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("rotary_backward(Tensor grad, Tensor cos, Tensor sin) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("rotary", &rotary);
  m.impl("rotary_backward", &rotary_backward);
}

}  // namespace isobit
