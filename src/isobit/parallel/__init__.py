"""One sum over ranks: the order of addition carried out over torch.distributed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit.parallel.batch import GlobalBatch, GlobalBatchSampler
    from isobit.parallel.column_linear import ColumnParallelLinear
    from isobit.parallel.exchange import all_gather, all_reduce, reduce_scatter
    from isobit.parallel.gradients import Gradients
    from isobit.parallel.row_linear import RowParallelLinear
    from isobit.parallel.scalars import LossMeter, clip_grad_norm_, total_norm
    from isobit.parallel.styles import Column, Row, Vocabulary
    from isobit.parallel.vocab_embedding import VocabParallelEmbedding

_HOMES = {
    "GlobalBatch": "batch",
    "GlobalBatchSampler": "batch",
    "ColumnParallelLinear": "column_linear",
    "all_gather": "exchange",
    "all_reduce": "exchange",
    "reduce_scatter": "exchange",
    "Gradients": "gradients",
    "RowParallelLinear": "row_linear",
    "LossMeter": "scalars",
    "clip_grad_norm_": "scalars",
    "total_norm": "scalars",
    "Column": "styles",
    "Row": "styles",
    "Vocabulary": "styles",
    "VocabParallelEmbedding": "vocab_embedding",
}
__all__ = [
    "Column",
    "ColumnParallelLinear",
    "GlobalBatch",
    "GlobalBatchSampler",
    "Gradients",
    "LossMeter",
    "Row",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "Vocabulary",
    "all_gather",
    "all_reduce",
    "clip_grad_norm_",
    "reduce_scatter",
    "total_norm",
]


def __getattr__(name: str) -> Any:
    """Imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'isobit.parallel' has no attribute {name!r}")
    return getattr(import_module(f"isobit.parallel.{_HOMES[name]}"), name)
