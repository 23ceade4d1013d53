// Rotary position embedding and its gradient: all heads of a token are rotated by its angles.
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "attestation.h"
#include "rows.h"

namespace isobit {

namespace {

// The rotation of one token, for the first (low) and the second (high) half of a head. The gradient
// applies the inverse rotation: sines exchanged between the halves and negated, which is exact.
struct Rotation {
  const float* cos_low;   // [half]
  const float* cos_high;  // [half]
  const float* sin_low;   // [half]
  const float* sin_high;  // [half]
  float sign;
};

// Elements [at, at + count) of both halves of one head, count <= 16. x and out are [2][half].
template <class T>
ISOBIT_INLINE void rotate_lanes(const Rotation& rotation, const T* x, int64_t half, int64_t at,
                                int64_t count, T* out) {
  Floats low, high, cos_low, cos_high, sin_low, sin_high;
  load_lanes(x + at, count, 0.0f, low);
  load_lanes(x + half + at, count, 0.0f, high);
  load_lanes(rotation.cos_low + at, count, 0.0f, cos_low);
  load_lanes(rotation.cos_high + at, count, 0.0f, cos_high);
  load_lanes(rotation.sin_low + at, count, 0.0f, sin_low);
  load_lanes(rotation.sin_high + at, count, 0.0f, sin_high);
  store_lanes(low * cos_low - high * (sin_low * rotation.sign), count, out + at);
  store_lanes(high * cos_high + low * (sin_high * rotation.sign), count, out + half + at);
}

// The rotation is passed by value, so that stores to `out` cannot change it.
//   x    [heads][2 * half]
//   out  [heads][2 * half], contiguous
template <class T>
ISOBIT_INLINE void rotate_token(Rotation rotation, RowMajor<const T> x, int64_t heads, int64_t half,
                                T* out) {
  for (int64_t head = 0; head < heads; head++, x.data += x.stride, out += 2 * half) {
    int64_t at = 0;
    for (; at + lane_count <= half; at += lane_count)
      rotate_lanes(rotation, x.data, half, at, lane_count, out);
    if (at < half) rotate_lanes(rotation, x.data, half, at, half - at, out);
  }
}

#define ISOBIT_ROTARY(T)                                                                        \
  ISOBIT_CLONES void rotate_heads(const Rotation& rotation, RowMajor<const T> x, int64_t heads, \
                                  int64_t half, T* __restrict out) {                            \
    rotate_token(rotation, x, heads, half, out);                                                \
  }
ISOBIT_ROTARY(float)
ISOBIT_ROTARY(BFloat16)
ISOBIT_ROTARY(Half)

// The offset in t of token `index` of the leading axes, in elements.
int64_t token_offset(const Tensor& t, at::IntArrayRef leading, int64_t index) {
  int64_t offset = 0;
  for (int64_t axis = leading.size(); axis-- > 0; index /= leading[axis])
    offset += index % leading[axis] * t.stride(axis);
  return offset;
}

Tensor with_contiguous_last_axis(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

// `shape` is [..., D]: that of x without its axis of heads.
void check_angles(const Tensor& x, const Tensor& cos, const Tensor& sin, at::IntArrayRef shape) {
  ISOBIT_CHECK(shape.back() % 2 == 0, "rotary", "x [..., heads, D] with an even D", describe(x),
               "call isobit.rotary");
  ISOBIT_CHECK(cos.dim() >= 1 && cos.size(-1) == shape.back() &&
                   at::is_expandable_to(cos.sizes(), shape) && sin.sizes() == cos.sizes(),
               "rotary", c10::str("cos and sin that expand to ", shape),
               c10::str("cos ", describe(cos), " and sin ", describe(sin)), "call isobit.rotary");
  ISOBIT_CHECK(sin.scalar_type() == cos.scalar_type() &&
                   (cos.scalar_type() == at::kFloat || cos.scalar_type() == x.scalar_type()),
               "rotary",
               c10::str("cos and sin of float32 or of ", dtype_name(x.scalar_type()), ", as x"),
               c10::str("cos ", describe(cos), " and sin ", describe(sin)), "call isobit.rotary");
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool inverse) {
  check_attested();
  ISOBIT_CHECK(x.dim() >= 2, "rotary", "x [..., heads, D]", describe(x), "call isobit.rotary");
  const at::IntArrayRef leading = x.sizes().slice(0, x.dim() - 2);
  std::vector<int64_t> shape = leading.vec();
  shape.push_back(x.size(-1));
  check_angles(x, cos, sin, shape);
  Tensor out = empty_tensor(x.sizes(), x.scalar_type());
  if (out.numel() == 0) return out;
  const Tensor input = with_contiguous_last_axis(x);
  // Converted before they are expanded, so that angles that tokens share are not copied.
  const Tensor cosines = with_contiguous_last_axis(cos.to(at::kFloat)).expand(shape);
  const Tensor sines = with_contiguous_last_axis(sin.to(at::kFloat)).expand(shape);
  const int64_t heads = x.size(-2), half = x.size(-1) / 2, token_size = heads * 2 * half;
  dispatch_dtype("rotary", x.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* src = input.const_data_ptr<T>();                 // as x, strides of input
    T* dst = out.mutable_data_ptr<T>();                       // [tokens][heads][2 * half]
    const float* cos_data = cosines.const_data_ptr<float>();  // [tokens][2 * half], strides of cos
    const float* sin_data = sines.const_data_ptr<float>();    // [tokens][2 * half], strides of sin
    const int64_t tokens = x.numel() / token_size;
    at::parallel_for(0, tokens, row_grain(token_size), [&](int64_t begin, int64_t end) {
      FixedFpEnvironment fp_environment;
      for (int64_t token = begin; token < end; token++) {
        const float* c = cos_data + token_offset(cosines, leading, token);  // [2][half]
        const float* s = sin_data + token_offset(sines, leading, token);    // [2][half]
        const Rotation rotation = inverse ? Rotation{c, c + half, s + half, s, -1.0f}
                                          : Rotation{c, c + half, s, s + half, 1.0f};
        rotate_heads(rotation, {src + token_offset(input, leading, token), input.stride(-2)}, heads,
                     half, dst + token * token_size);
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
