"""The sums of isobit's linear layer as targets of `isobit.reveal`, and the order that each must show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from isobit.ops import dispatch
from isobit.ops.linear.op import linear, linear_with_packed
from isobit.ops.linear.packed import PackedWeight
from isobit.order.addition import Branch
from isobit.order.evaluate import expected_tree, feature_segments
from isobit.order.samples import Samples
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget

Decoder = Callable[[torch.nn.Linear], Callable[[Tensor], Tensor]]


def packed_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the layer's forward pass over its packed weight."""
    watched = PackedWeight(layer.weight)

    def decode(x: Tensor) -> Tensor:
        snapshot = watched.current(layer.weight)
        packed = None if snapshot is None else snapshot.packed
        return linear_with_packed(x, layer.weight, None, None, packed)

    return decode


def frozen(
    k: int,
    m: int = 1,
    n: int = 200,
    dtype: torch.dtype = torch.float32,
    decoder: Decoder = packed_decoder,
) -> TensorTarget:
    """Return y over k of a frozen layer: m rows, n outputs.

    Probes are written into the rows of x, because each write to the weight would pack it again.
    """
    layer = torch.nn.Linear(k, n, bias=False, dtype=dtype).requires_grad_(False)
    decode = decoder(layer)
    x = torch.zeros(m, k, dtype=dtype)

    def run() -> Tensor:
        return decode(x)

    name = f"isobit.nn.Linear, frozen, {m}×{k} by {n}×{k}"
    return TensorTarget(name, x, lambda: run()[:, -1], "product", layer.weight, everywhere=run)


# Every row and column must have the bits of the one that is read.
TARGETS: dict[str, Callable[..., TensorTarget]] = {
    "linear": partial(targets.linear, function=linear, row=None),
    "frozen": frozen,
    "input_grad": partial(targets.input_grad, function=linear, row=None),
    "weight_grad": partial(targets.weight_grad, function=linear, everywhere=True),
    "bias_grad": partial(targets.bias_grad, function=linear),
}


def expected_order(name: str, k: int, dtype: torch.dtype) -> Branch:
    """Return the order that the target `name` must show over k terms (features, or tokens of one sample)."""
    features = name in ("linear", "frozen", "input_grad")
    engine = "striped" if name == "bias_grad" else dispatch.engine_of(dtype)
    segments = feature_segments(k, engine) if features else Samples.packed([k]).segments
    return expected_tree(segments, engine)
