// Memory for results, on huge pages where the system grants them; and for scratch.
#pragma once

#include <ATen/core/Tensor.h>

#include "scratch.h"

namespace isobit {

// A contiguous CPU tensor, uninitialised. Defined in memory.cpp: torch's headers compile slowly.
at::Tensor empty_tensor(at::IntArrayRef shape, at::ScalarType dtype);

}  // namespace isobit
