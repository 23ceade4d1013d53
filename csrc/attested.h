// Refuses calls of kernels that were not held to the order, or whose engine is switched off.
#pragma once

namespace isobit {

void check_attested();
void check_engine();  // for kernels over the tile engine

}  // namespace isobit
