// The packed form of a weight, which the forward of a linear layer may use instead of the weight.
#pragma once

#include <ATen/core/Tensor.h>

namespace isobit {

// Returns [panels, packed length, panel_width] in the engine's dtype: the rows of weight [N, K] as
// columns of panels, leaf by leaf of the feature schedule of K.
at::Tensor pack_weight(const at::Tensor& weight);

// Whether nothing has requested the weight's memory for writing since it was watched. A packed form
// that was made after that is current.
bool has_clean_memory(const at::Tensor& weight);

}  // namespace isobit
