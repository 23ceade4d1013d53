// The linear layer: the output (a sum over K) and the input gradient (a sum over N).
#include "linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>
#include <optional>

#include "attestation.h"
#include "few_rows.h"
#include "packed_weight.h"
#include "product.h"

namespace isobit {

Tensor as_matrix(const Tensor& t, at::ScalarType dtype) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < t.dim(); axis++) rows *= t.size(axis);
  return t.reshape({rows, t.size(-1)}).to(dtype);
}

std::vector<int64_t> output_shape(const Tensor& like, int64_t last, const Tensor& out,
                                  bool has_roots) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = last;
  if (has_roots) shape.insert(shape.begin(), out.size(0));
  return shape;
}

Schedule product_schedule(const SummedAxis& axis, int64_t length) {
  const int64_t segments = count_segments(axis.extent, feature_unit, feature_cap);
  const int64_t size = std::max<int64_t>(axis.extent / segments, 1);
  return product_schedule(axis.extent, axis.first / size,
                          axis.extent == length ? segments : length / size);
}

int64_t count_roots(int64_t first, int64_t segments) {
  int64_t roots = 0, end = first + segments;
  while (first < end) {
    int64_t step = first ? first & -first : int64_t(1) << 40;
    while (first + step > end) step /= 2;
    first += step;
    roots++;
  }
  return roots;
}

template <class T>
Tensor multiply(const Operand<T>& left, const Operand<T>& right, const ProductSpec& spec) {
  const int64_t segments = spec.schedule.segment_count();
  std::vector<int64_t> shape{spec.rows, spec.cols};
  if (spec.returns_roots)
    shape.insert(shape.begin(), count_roots(spec.schedule.first_segment, segments));
  Tensor out = empty_tensor(shape, spec.dtype);
  if (segments == 0) return out.zero_();  // a batch without samples
  dispatch_dtype("linear", spec.dtype, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    const Output<Out> output{out.mutable_data_ptr<Out>(), spec.cols, spec.rows * spec.cols,
                             spec.bias, spec.swap_operands};
    const T* packed = static_cast<const T*>(spec.packed);  // [panels][packed length][panel_width]
    if (spec.swap_operands)
      Product<T, Out>(spec.schedule, right, {left, nullptr}, output, spec.cols, spec.rows).run();
    else
      Product<T, Out>(spec.schedule, left, {right, packed}, output, spec.rows, spec.cols).run();
  });
  return out;
}
template Tensor multiply(const Operand<float>&, const Operand<float>&, const ProductSpec&);
template Tensor multiply(const Operand<BFloat16>&, const Operand<BFloat16>&, const ProductSpec&);

Tensor multiply(const Tensor& left, int left_summed, const Tensor& right, int right_summed,
                const ProductSpec& spec) {
  return dispatch_engine_dtype(left.scalar_type(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    return multiply<T>(matrix_view<T>(left, 1 - left_summed, left_summed),
                       matrix_view<T>(right, 1 - right_summed, right_summed), spec);
  });
}

namespace {

using OptionalTensor = std::optional<Tensor>;

void check_linear(const Tensor& x, const Tensor& weight) {
  check_engine();
  ISOBIT_CHECK(weight.dim() == 2, "linear", "a weight [N, K]", describe(weight),
               "call isobit.linear");
  ISOBIT_CHECK(x.dim() >= 1 && x.size(-1) == weight.size(1), "linear",
               c10::str("x [..., ", weight.size(1), "], as weight is ", weight.sizes()),
               describe(x), "make the last axis of x and of weight the same");
}

void check_output_grad(const Tensor& grad, const Tensor& weight) {
  check_engine();
  ISOBIT_CHECK(weight.dim() == 2, "linear", "a weight [N, K]", describe(weight),
               "call isobit.linear");
  ISOBIT_CHECK(grad.dim() >= 1 && grad.size(-1) == weight.size(0), "linear",
               c10::str("a gradient [..., ", weight.size(0), "], as weight is ", weight.sizes()),
               describe(grad), "call isobit.linear, and let autograd call this");
}

// Which of two ways to the same bits is faster was measured.
bool packed_is_faster(int64_t rows, at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? rows > 64 : rows <= 32;
}

// Whether the weight is read in place: measured. The engine needs a widened copy of a weight that
// is not fp32, and a packed one has twice its bytes.
bool few_rows_are_faster(int64_t rows, const Tensor& weight, bool has_packed) {
  const bool chains = engine_dtype(weight.scalar_type()) == at::kFloat;
  if (rows == 0 || !chains || weight.stride(1) != 1 || !has_avx512()) return false;
  if (weight.scalar_type() == at::kFloat) return !has_packed && rows <= 8;
  return rows <= (has_packed ? 8 : 16);
}

// [rows, N]. `bias` is [N], or null.
Tensor multiply_few_rows(const Tensor& left, const Tensor& weight, const float* bias,
                         const Schedule& schedule, at::ScalarType dtype) {
  const int64_t rows = left.size(0), cols = weight.size(0);
  const auto multiply = [&](auto computed) {
    constexpr int R = decltype(computed)::value;  // the rows after `rows` are zeros
    const Tensor x = rows == R ? left.contiguous() : at::constant_pad_nd(left, {0, 0, 0, R - rows});
    Tensor out = empty_tensor({R, cols}, dtype);
    dispatch_dtype("linear", weight.scalar_type(), [&](auto weight_tag) {
      dispatch_dtype("linear", dtype, [&](auto out_tag) {
        using T = typename decltype(weight_tag)::type;
        using Out = typename decltype(out_tag)::type;
        FewRows<R, T, Out>(schedule, {x.const_data_ptr<float>(), x.stride(0)},
                           {weight.const_data_ptr<T>(), weight.stride(0)}, bias,
                           {out.mutable_data_ptr<Out>(), cols})
            .run(cols);
      });
    });
    return rows == R ? out : out.narrow(0, 0, rows).contiguous();
  };
  if (rows == 1) return multiply(std::integral_constant<int, 1>());
  if (rows == 2) return multiply(std::integral_constant<int, 2>());
  if (rows <= 4) return multiply(std::integral_constant<int, 4>());
  if (rows <= 8) return multiply(std::integral_constant<int, 8>());
  return at::cat({multiply_few_rows(left.narrow(0, 0, 8), weight, bias, schedule, dtype),
                  multiply_few_rows(left.narrow(0, 8, rows - 8), weight, bias, schedule, dtype)});
}

// `bias` is [N] and `packed` as pack_weight returns it; both may be absent.
Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
              const OptionalTensor& packed, const SummedAxis& axis) {
  const at::ScalarType dtype = engine_dtype(x.scalar_type());
  const Tensor left = as_matrix(x, dtype);
  const int64_t rows = left.size(0), cols = weight.size(0);
  const Tensor fp32_bias = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const Schedule schedule = product_schedule(axis, left.size(1));
  ProductSpec spec{schedule, rows, cols, axis.output_dtype(x.scalar_type()), axis.returns_roots};
  const float* bias_data = bias ? fp32_bias.const_data_ptr<float>() : nullptr;  // [N]
  const bool is_whole = axis.first == 0 && axis.extent == left.size(1);
  if (is_whole && few_rows_are_faster(rows, weight, packed.has_value())) {
    Tensor out = multiply_few_rows(left, weight, bias_data, schedule, spec.dtype);
    if (axis.returns_roots) out = out.unsqueeze(0);
    return out.view(output_shape(x, cols, out, axis.returns_roots));
  }
  const bool use_packed = packed && packed_is_faster(rows, dtype);
  // Without a packed weight the smaller operand is packed. The leaf is symmetric in its operands,
  // so swapping them does not change bits.
  spec.swap_operands = !use_packed && rows < cols;
  spec.bias = bias_data;
  spec.packed = use_packed ? packed->const_data_ptr() : nullptr;
  const Tensor right = use_packed ? left : weight.to(dtype);  // not read if the weight is packed
  const Tensor out = multiply(left, 1, right, 1, spec);
  return out.view(output_shape(x, cols, out, axis.returns_roots));
}

Tensor input_grad(const Tensor& grad, const Tensor& weight, const SummedAxis& axis) {
  const at::ScalarType dtype = engine_dtype(grad.scalar_type());
  const Tensor left = as_matrix(grad, dtype), right = weight.to(dtype);
  const Schedule schedule = product_schedule(axis, left.size(1));
  const ProductSpec spec{schedule, left.size(0), right.size(1),
                         axis.output_dtype(grad.scalar_type()), axis.returns_roots};
  const Tensor out = multiply(left, 1, right, 0, spec);
  return out.view(output_shape(grad, right.size(1), out, axis.returns_roots));
}

// `spans` and `of` are not used here: autograd passes them to the gradient.
Tensor linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& /*spans*/, const OptionalTensor& packed, int64_t /*of*/) {
  check_linear(x, weight);
  ISOBIT_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "linear",
               c10::str("a bias [", weight.size(0), "], as weight is ", weight.sizes()),
               describe(*bias), "call isobit.linear");
  const bool is_current = packed && has_clean_memory(weight);
  return linear(x, weight, bias, is_current ? packed : OptionalTensor(), {x.size(-1), 0, false});
}

Tensor linear_roots_op(const Tensor& x, const Tensor& weight, int64_t extent, int64_t first) {
  check_linear(x, weight);
  return linear(x, weight, {}, {}, {extent, first, true});
}

Tensor input_grad_op(const Tensor& grad, const Tensor& weight) {
  check_output_grad(grad, weight);
  return input_grad(grad, weight, {weight.size(0), 0, false});
}

Tensor input_grad_roots_op(const Tensor& grad, const Tensor& weight, int64_t extent,
                           int64_t first) {
  check_output_grad(grad, weight);
  return input_grad(grad, weight, {extent, first, true});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? spans, Tensor? packed, int of=0) "
      "-> Tensor");
  m.def("linear_roots(Tensor x, Tensor weight, int extent, int first) -> Tensor");
  m.def("linear_input_grad(Tensor grad, Tensor weight) -> Tensor");
  m.def("linear_input_grad_roots(Tensor grad, Tensor weight, int extent, int first) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear", &linear_op);
  m.impl("linear_roots", &linear_roots_op);
  m.impl("linear_input_grad", &input_grad_op);
  m.impl("linear_input_grad_roots", &input_grad_roots_op);
}

}  // namespace isobit
