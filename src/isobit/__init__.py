"""Bitwise-consistent training and inference for PyTorch, with the proof attached."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit import bits, nn, targets
    from isobit.errors import (
        ArgumentError,
        ContractError,
        CutError,
        EngineError,
        IsobitError,
        RevealError,
        UnsupportedError,
    )
    from isobit.nn import freeze
    from isobit.ops.attention.cache import KVCache
    from isobit.ops.attention.op import attention
    from isobit.ops.linear.group import linear_group
    from isobit.ops.linear.op import linear
    from isobit.ops.log_softmax.op import log_softmax
    from isobit.ops.logprob.op import linear_logprob
    from isobit.ops.softmax.op import softmax
    from isobit.order.certify import Certificate
    from isobit.order.cut import Cut
    from isobit.order.reveal import Tree
    from isobit.order.samples import Samples
    from isobit.targets.accept import certify, reveal

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Certificate",
    "ContractError",
    "Cut",
    "CutError",
    "EngineError",
    "IsobitError",
    "KVCache",
    "RevealError",
    "Samples",
    "Tree",
    "UnsupportedError",
    "attention",
    "bits",
    "certify",
    "freeze",
    "linear",
    "linear_group",
    "linear_logprob",
    "log_softmax",
    "nn",
    "reveal",
    "softmax",
    "targets",
]

# Imported when first asked for: `isobit status` and `isobit lint` answer without loading torch.
_HOMES = {
    "KVCache": "ops.attention.cache",
    "log_softmax": "ops.log_softmax.op",
    "linear_logprob": "ops.logprob.op",
    "linear_group": "ops.linear.group",
    "attention": "ops.attention.op",
    "Certificate": "order.certify",
    "Cut": "order.cut",
    "Samples": "order.samples",
    "Tree": "order.reveal",
    "certify": "targets.accept",
    "freeze": "nn",
    "linear": "ops.linear.op",
    "reveal": "targets.accept",
    "softmax": "ops.softmax.op",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'isobit' has no attribute {name!r}")
    if name in ("bits", "nn", "targets"):
        return import_module(f"isobit.{name}")
    home = import_module(f"isobit.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
