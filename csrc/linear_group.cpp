// The input gradient of linear layers that share an input (Q, K and V; gate and up): one sum.
//
// The summed axis runs group by group: the first of `groups` equal parts of each weight's rows,
// then the second part of each, and so on. A tensor-parallel rank then owns whole segments.
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include "attestation.h"
#include "engine.h"
#include "linear.h"

namespace isobit {

namespace {

// One weight's part of one group.
struct Part {
  Tensor grad;    // [tokens, part]
  Tensor weight;  // [part, K]
};

std::vector<Part> cut_parts(const std::vector<Tensor>& grads, const std::vector<Tensor>& weights,
                            int64_t groups) {
  std::vector<Part> parts;
  for (int64_t g = 0; g < groups; g++)
    for (size_t i = 0; i < grads.size(); i++) {
      const int64_t rows = weights[i].size(0) / groups;
      parts.push_back({grads[i].narrow(1, g * rows, rows), weights[i].narrow(0, g * rows, rows)});
    }
  return parts;
}

// Where every leaf lies inside one part nothing is copied; otherwise the parts are joined first.
template <class T>
Tensor multiply_parts(const std::vector<Part>& parts, const ProductSpec& spec) {
  std::vector<MatrixView<T>> left, right;  // per leaf: [tokens][length], [K][length]
  int64_t part = 0, begin = 0;
  for (const Leaf& leaf : spec.schedule.leaves) {
    while (leaf.start >= begin + parts[part].weight.size(0)) begin += parts[part++].weight.size(0);
    if (leaf.start + leaf.length > begin + parts[part].weight.size(0)) break;
    left.push_back(matrix_view<T>(parts[part].grad, 0, 1).from(0, leaf.start - begin));
    right.push_back(matrix_view<T>(parts[part].weight, 1, 0).from(0, leaf.start - begin));
  }
  if (left.size() == spec.schedule.leaves.size())
    return multiply<T>(Operand<T>(left), Operand<T>(right), spec);
  std::vector<Tensor> columns, rows;
  for (const Part& p : parts) {
    columns.push_back(p.grad);
    rows.push_back(p.weight);
  }
  return multiply(at::cat(columns, 1), 1, at::cat(rows, 0), 0, spec);
}

Tensor group_input_grad(at::TensorList grads, at::TensorList weights, int64_t groups,
                        const SummedAxis& axis) {
  const at::ScalarType dtype = engine_dtype(grads[0].scalar_type());
  std::vector<Tensor> left, right;
  int64_t length = 0;
  for (size_t i = 0; i < grads.size(); i++) {
    left.push_back(as_matrix(grads[i], dtype));
    right.push_back(weights[i].to(dtype));
    length += grads[i].size(-1);
  }
  const Schedule schedule = product_schedule(axis, length);
  const ProductSpec spec{schedule, left[0].size(0), right[0].size(1),
                         axis.output_dtype(grads[0].scalar_type()), axis.returns_roots};
  const std::vector<Part> parts = cut_parts(left, right, groups);
  const Tensor out = dispatch_engine_dtype(
      dtype, [&](auto tag) { return multiply_parts<typename decltype(tag)::type>(parts, spec); });
  return out.view(output_shape(grads[0], right[0].size(1), out, axis.returns_roots));
}

// Returns the rows of all weights.
int64_t check_group(at::TensorList grads, at::TensorList weights, int64_t groups) {
  check_engine();
  const char *function = "linear_group", *remedy = "call isobit.linear_group";
  ISOBIT_CHECK(grads.size() == weights.size() && !grads.empty(), function,
               "as many gradients as weights, and at least one",
               c10::str(grads.size(), " gradients and ", weights.size(), " weights"), remedy);
  ISOBIT_CHECK(groups > 0, function, "at least one group", groups, remedy);
  int64_t rows = 0;
  for (size_t i = 0; i < grads.size(); i++) {
    const Tensor &grad = grads[i], &weight = weights[i];
    ISOBIT_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(0) % groups == 0 &&
                     weight.size(1) == weights[0].size(1),
                 function, c10::str("weights [N, K] of one K, N a multiple of ", groups, " groups"),
                 c10::str("weight ", i, " ", describe(weight), ", weight 0 ", describe(weights[0])),
                 remedy);
    ISOBIT_CHECK(
        grad.dim() >= 1 && grad.size(-1) == weight.size(0) &&
            leading_axes(grad) == leading_axes(grads[0]),
        function,
        c10::str("a gradient [..., ", weight.size(0), "] of the same tokens for weight ", i),
        c10::str(describe(grad), ", gradient 0 ", describe(grads[0])), remedy);
    rows += weight.size(0);
  }
  return rows;
}

Tensor group_input_grad_op(at::TensorList grads, at::TensorList weights, int64_t groups) {
  const int64_t rows = check_group(grads, weights, groups);
  return group_input_grad(grads, weights, groups, {rows, 0, false});
}

Tensor group_input_grad_roots_op(at::TensorList grads, at::TensorList weights, int64_t groups,
                                 int64_t extent, int64_t first) {
  check_group(grads, weights, groups);
  return group_input_grad(grads, weights, groups, {extent, first, true});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(isobit, m) {
  m.def("linear_group_input_grad(Tensor[] grads, Tensor[] weights, int groups) -> Tensor");
  m.def(
      "linear_group_input_grad_roots(Tensor[] grads, Tensor[] weights, int groups, int extent, "
      "int first) -> Tensor");
}

TORCH_LIBRARY_IMPL(isobit, CPU, m) {
  m.impl("linear_group_input_grad", &group_input_grad_op);
  m.impl("linear_group_input_grad_roots", &group_input_grad_roots_op);
}

}  // namespace isobit
