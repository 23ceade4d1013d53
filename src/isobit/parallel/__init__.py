"""Data and tensor parallelism over torch.distributed with a fixed order of addition.

Data parallelism: `GlobalBatch`, `Gradients`, `LossMeter`. Tensor parallelism: `ColwiseParallel`,
`RowwiseParallel`, `VocabParallel`. Collectives: `all_reduce`, `reduce_scatter`, `all_gather`.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
