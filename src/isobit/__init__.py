"""Bitwise-consistent training and inference for PyTorch, with the proof attached."""

from importlib import import_module

# Known to type checkers by its name. Nothing that Python has not loaded yet is imported here: under `python -m isobit`
# the current folder is still on the search path.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from isobit import bits, guards, nn, optim, parallel, simulator, targets
    from isobit.adapters.causal import logprobs
    from isobit.adapters.sampling import KeyedSampling
    from isobit.adapters.strictness import coverage
    from isobit.adapters.transformers import enable
    from isobit.errors import (
        AgreementError,
        ArgumentError,
        ContractError,
        CutError,
        EngineError,
        IsobitError,
        RevealError,
        SimulationError,
        UnsupportedError,
    )
    from isobit.nn import freeze
    from isobit.ops.attention.cache import KVCache
    from isobit.ops.attention.op import attention
    from isobit.ops.embedding.op import embedding
    from isobit.ops.exact_sum.op import exact_sum
    from isobit.ops.gelu.op import gelu
    from isobit.ops.layer_norm.op import layer_norm
    from isobit.ops.linear.group import linear_group
    from isobit.ops.linear.op import linear
    from isobit.ops.log_softmax.op import log_softmax
    from isobit.ops.logprob.loss import linear_cross_entropy
    from isobit.ops.logprob.op import linear_logprob
    from isobit.ops.rms_norm.op import rms_norm
    from isobit.ops.rotary.op import rotary
    from isobit.ops.silu.op import silu
    from isobit.ops.softmax.op import softmax
    from isobit.ops.swiglu.op import swiglu
    from isobit.order.certify import Certificate
    from isobit.order.cut import Cut
    from isobit.order.reveal import Tree
    from isobit.order.samples import Samples
    from isobit.targets.accept import certify, reveal

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArgumentError",
    "Certificate",
    "ContractError",
    "Cut",
    "CutError",
    "EngineError",
    "IsobitError",
    "KVCache",
    "KeyedSampling",
    "RevealError",
    "Samples",
    "SimulationError",
    "Tree",
    "UnsupportedError",
    "attention",
    "bits",
    "certify",
    "coverage",
    "embedding",
    "enable",
    "exact_sum",
    "freeze",
    "gelu",
    "guards",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_group",
    "linear_logprob",
    "log_softmax",
    "logprobs",
    "nn",
    "optim",
    "parallel",
    "reveal",
    "rms_norm",
    "rotary",
    "silu",
    "simulator",
    "softmax",
    "swiglu",
    "targets",
]

# Imported when first asked for: `isobit status` and `isobit lint` answer without loading torch.
_HOMES = {
    "Certificate": "order.certify",
    "Cut": "order.cut",
    "KVCache": "ops.attention.cache",
    "KeyedSampling": "adapters.sampling",
    "Samples": "order.samples",
    "Tree": "order.reveal",
    "attention": "ops.attention.op",
    "certify": "targets.accept",
    "coverage": "adapters.strictness",
    "embedding": "ops.embedding.op",
    "enable": "adapters.transformers",
    "exact_sum": "ops.exact_sum.op",
    "freeze": "nn",
    "gelu": "ops.gelu.op",
    "layer_norm": "ops.layer_norm.op",
    "linear": "ops.linear.op",
    "linear_cross_entropy": "ops.logprob.loss",
    "linear_group": "ops.linear.group",
    "linear_logprob": "ops.logprob.op",
    "log_softmax": "ops.log_softmax.op",
    "logprobs": "adapters.causal",
    "reveal": "targets.accept",
    "rms_norm": "ops.rms_norm.op",
    "rotary": "ops.rotary.op",
    "silu": "ops.silu.op",
    "softmax": "ops.softmax.op",
    "swiglu": "ops.swiglu.op",
}


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module 'isobit' has no attribute {name!r}")
    if name in ("bits", "guards", "nn", "optim", "parallel", "simulator", "targets"):
        return import_module(f"isobit.{name}")
    home = import_module(f"isobit.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
