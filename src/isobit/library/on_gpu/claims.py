"""Predicates of contracts on fewer tokens: the same code, with smaller constants in its module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.claims import Predicate, placements, replaced
from isobit.order.samples import Samples

LENGTHS = (3, 0, 260, 5)  # of samples: one empty, one longer than a leaf of 256 tokens
FEW = (3, 0, 18, 5)


def fewer(module: str, predicate: str, **constants: Any) -> Predicate:
    """Return a predicate that runs with other constants in its module."""

    def smaller(subject: Any, case: Case, tally: Tally) -> None:
        home = import_module(f"isobit.library.{module}")
        with ExitStack() as stack:
            for name, value in constants.items():
                stack.enter_context(replaced(home, name, value))
            getattr(home, predicate)(subject, case, tally)

    return smaller


class FewSamples:
    """Stands for `Samples` where a predicate describes its own batch."""

    @staticmethod
    def padded(*_: Any, **__: Any) -> Samples:
        """Return three samples, the second of them empty."""
        return Samples.padded((9, 0, 18), width=20, side="left")


class CloseSamples:
    """Stands for `Samples` where a predicate pads to 520 rows: it pads to two more than the longest sample."""

    packed = Samples.packed

    @staticmethod
    def padded(lengths: Sequence[int], *, width: int, side: str) -> Samples:
        """Return samples with little padding."""
        return Samples.padded(lengths, width=max(lengths) + 2, side=side)


def close_placements(lengths: Sequence[int], width: int) -> Iterator[tuple[str, Samples]]:
    """Yield placements with little padding."""
    return placements(lengths, max(lengths) + 2)


def in_one_storage(compare: Any, tensors: Sequence[Tensor], described: Samples) -> None:
    """Compare in one memory layout of another stride; a kernel on a GPU has no CPU threads."""
    compare(*(tensor.repeat(1, 2)[:, : tensor.shape[1]] for tensor in tensors), described, "apart")


def in_no_storage(compare: Any, tensors: Sequence[Tensor], described: Samples) -> None:
    """Compare nothing: placements have shown it, and a case takes long."""


norm_samples = fewer("norms", "samples", SAMPLE_LENGTHS=FEW)
norm_head_samples = fewer("norms", "head_samples", SAMPLE_LENGTHS=FEW)
norm_gradients = fewer("norms", "gradients_agree", Samples=FewSamples)
embedding_samples = fewer("embedding", "samples", SAMPLE_LENGTHS=LENGTHS)
embedding_padding = fewer("embedding", "padding_has_none", SAMPLE_LENGTHS=LENGTHS)
# Micro-batches are merged from partial sums.
linear_samples = fewer("linear.claims", "samples", SAMPLE_LENGTHS=LENGTHS, MICRO_BATCHES=())
group_samples = fewer("linear_group", "samples", SAMPLE_LENGTHS=FEW, Samples=CloseSamples)
logprob_samples = fewer(
    "logprob.claims", "samples", SAMPLE_LENGTHS=FEW, placements=close_placements
)
distillation_samples = fewer(
    "distillation.claims", "samples", SAMPLE_LENGTHS=FEW, placements=close_placements
)
attention_decode = fewer("attention.claims", "decode_is_prefill", DECODED=4, CHUNKS=(64,))


def attention_masks(subject: Any, case: Case, tally: Tally) -> None:
    """Compare with the portable executor in fp32, and with stock's attention in fp64."""
    claims = import_module("isobit.library.attention.claims")
    (claims.masks_and_caps if case.dtype == torch.float32 else claims.near_stock)(
        subject, case, tally
    )


attention_samples = fewer("attention.claims", "samples_are_alone", LENGTHS=(3, 66), WIDTH=70)
FEW_EXPERTS = {"EXPERTS": 4, "CHOSEN": 2, "OUTPUTS": 3, "LENGTHS": (3, 0, 4, 1)}
experts_layouts = fewer(
    "mixture_of_experts",
    "layouts",
    **FEW_EXPERTS,
    SCORES=("softmax",),
    placements=close_placements,
    in_every_storage_and_thread_count=in_one_storage,
)
experts_gradients = fewer("mixture_of_experts", "weight_gradients", **FEW_EXPERTS)
convolution_samples = fewer(
    "causal_conv",
    "placed",
    LENGTHS=(5, 1, 0, 2),
    placements=close_placements,
    in_every_storage_and_thread_count=in_one_storage,
)
delta_pieces = fewer("delta_rule", "by_pieces", HEADS=2, VALUE=3, CUTS=((1,), (2, 3)))
delta_crops = fewer("delta_rule", "cropped", HEADS=2, VALUE=3)
delta_samples = fewer(
    "delta_rule",
    "placed",
    HEADS=2,
    VALUE=3,
    LENGTHS=(3, 1, 0, 2),
    placements=close_placements,
    in_every_storage_and_thread_count=in_no_storage,
)
delta_executors = fewer("delta_rule", "equal_executors", HEADS=4, VALUE=3)
