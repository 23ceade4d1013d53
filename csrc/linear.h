// The linear operator's four sums, and the packed form of a weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <optional>

#include "order.h"

namespace isobit {

using at::Tensor;

// What is summed: a whole extent, or a share of one that starts at `first` and returns its roots in
// fp32.
struct Share {
  int64_t extent, first;
  bool roots;
};

bool tile_engine_pairs_bf16();  // AMX: bf16 enters the engine as pairs; elsewhere bf16 is widened
                                // to fp32

at::ScalarType engine_type(at::ScalarType type);  // in which the engine takes it

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& packed, Share share);
Tensor input_grad(const Tensor& grad, const Tensor& weight, Share share);
Tensor group_input_grad(at::TensorList grads, at::TensorList weights, int64_t groups, Share share);
Tensor weight_grad(const Tensor& grad, const Tensor& x, const Tensor& spans, Share share);
Tensor bias_grad(const Tensor& grad, const Tensor& spans, Share share);

Tensor pack_weight(const Tensor& weight);

}  // namespace isobit
