// Softmax over the last axis, and its gradient.
#pragma once

#include <ATen/core/Tensor.h>

namespace isobit {

using at::Tensor;

Tensor softmax(const Tensor& x);
Tensor softmax_backward(const Tensor& grad, const Tensor& y);

}  // namespace isobit
