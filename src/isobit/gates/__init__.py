"""End-to-end checks of bits: the batch-layout gate and the rank-layout gate.

`model/` (`isobit gate model`) runs one model in every layout of a batch. `training/` (`isobit gate training`)
trains one run in every layout of ranks and micro-batches.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
