// Checks that run first in every operator: the kernels are attested, and the tile engine is on.
//
// At start-up the Python package compares the kernels with the order of addition (ops/dispatch.py)
// and calls torch.ops.isobit.attest(True) if they agree. Until then every operator raises.
#pragma once

namespace isobit {

// Raises if the kernels are not attested.
void check_attested();

// As check_attested, and raises if oneDNN is disabled. For operators that use the tile engine.
void check_engine();

}  // namespace isobit
