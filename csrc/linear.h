// What the sums of a linear layer share: the summed axis of a call, and the product along it.
//
// [Note: roots] A call may have only a part of a summed axis: a tensor-parallel rank's features, or
// a data-parallel rank's samples. It then returns the roots of the subtrees that it completed, in
// fp32 and with a leading axis [roots, ...], and the caller merges them with those of other ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "dtypes.h"
#include "panels.h"

namespace isobit {

// The summed axis of a call: elements (features or samples) from `first` on, of `extent` in the
// whole problem.
struct SummedAxis {
  int64_t extent, first;
  bool returns_roots;

  at::ScalarType output_dtype(at::ScalarType dtype) const {
    return returns_roots ? at::kFloat : dtype;
  }
};

struct ProductSpec {
  const Schedule& schedule;
  int64_t rows, cols;
  at::ScalarType dtype;  // of the result
  bool returns_roots;
  bool swap_operands = false;    // compute the transposed product, and write it transposed
  const float* bias = nullptr;   // [cols], or null. Not owned.
  const void* packed = nullptr;  // the right operand as pack_weight returns it, or null. Not owned.
};

// Returns left · right as [rows, cols], or [roots, rows, cols]. Defined for float and BFloat16.
// left is [rows][summed], right [cols][summed].
template <class T>
Tensor multiply(const Operand<T>& left, const Operand<T>& right, const ProductSpec& spec);

// The same for 2-d tensors of the engine's dtype; the axes `left_summed` and `right_summed` are
// summed.
Tensor multiply(const Tensor& left, int left_summed, const Tensor& right, int right_summed,
                const ProductSpec& spec);

template <class T>
MatrixView<T> matrix_view(const Tensor& t, int kept_axis, int summed_axis) {
  return {t.const_data_ptr<T>(), t.stride(kept_axis), t.stride(summed_axis)};
}

// t [..., n] as [rows, n] of a dtype.
Tensor as_matrix(const Tensor& t, at::ScalarType dtype);

// All axes but the last.
inline at::IntArrayRef leading_axes(const Tensor& t) { return t.sizes().slice(0, t.dim() - 1); }

// The shape of `like` with another last axis, and with the roots of `out` in front of it if it has
// them.
std::vector<int64_t> output_shape(const Tensor& like, int64_t last, const Tensor& out,
                                  bool has_roots);

// The schedule of a feature axis of which this call has `length` elements.
Schedule product_schedule(const SummedAxis& axis, int64_t length);

// How many roots remain after `segments` segments from `first` on are merged as far as possible.
int64_t count_roots(int64_t first, int64_t segments);

}  // namespace isobit
