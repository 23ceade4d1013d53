// What the tile engine of this machine supports.
#include "engine.h"

namespace isobit {

bool engine_pairs_bf16() {
  static const bool pairs = engine::could_pack(at::kBFloat16);
  return pairs;
}

at::ScalarType engine_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 && engine_pairs_bf16() ? at::kBFloat16 : at::kFloat;
}

}  // namespace isobit
