"""linear_logprob over a vocabulary that is cut over ranks: partial results, and the functions that merge them.

There are T tokens, K features and V = cut.extent words; this rank's weight is [cut.length, K]. No function here has a
gradient: the caller owns the exchange between ranks, and rounds dhidden once, after the last merge.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from isobit.errors import ArgumentError, CutError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.linear.op import check_linear
from isobit.ops.logprob import portable
from isobit.ops.logprob.op import check_targets, check_temperature
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import Pair, one_nan
from isobit.ops.share import accumulation_dtype
from isobit.order import tree
from isobit.order.cut import Cut


@torch.no_grad()
def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cut: Cut
) -> tuple[Tensor, Tensor]:
    """Return the share's pairs (max, sum) [T, 2], and the scaled logits of the targets [T].

    Targets are ids of the whole vocabulary, or −100. Exactly one share has the logit of a target; the others return +0.
    """
    check_problem(hidden, weight, targets, temperature, cut)
    ids = targets.to(torch.int64).contiguous()
    if dispatch.is_native(hidden.dtype):
        pairs_of = torch.ops.isobit.linear_logprob_pairs
        return pairs_of(hidden, weight, ids, float(temperature), cut.extent, cut.start)  # type: ignore[no-any-return]
    return keeping_subnormals(portable.pairs_and_chosen)(
        hidden, weight, ids, float(temperature), cut
    )


@keeping_subnormals
@torch.no_grad()
def merge(pairs: Tensor) -> Tensor:
    """Return the pairs [T, 2] of the whole vocabulary from those of all shares [P, T, 2], in their order."""
    if pairs.dim() != 3 or pairs.shape[2] != 2:
        refuse_shape("pairs", pairs, "[P, T, 2]", "stack the pairs of all shares, by index")
    parts = len(pairs)
    if parts < 1 or parts & (parts - 1):
        raise CutError(
            expected="the pairs of all shares, a power of two of them",
            received=f"{parts}",
            remedy="cut the vocabulary by isobit.order.Cut, and pass every share once",
        )
    total = tree.merge(
        [Pair(share[:, :1], share[:, 1:]) for share in pairs.unbind(0)], operator.add
    )
    return one_nan(torch.cat([total.max, total.sum], 1))


@keeping_subnormals
@torch.no_grad()
def finish(pairs: Tensor, chosen: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T], and the maxima and logs of sums [T, 2] for `backward`, from merged pairs."""
    if pairs.shape != (len(targets), 2) or chosen.shape != targets.shape:
        refuse_shape(
            "pairs",
            pairs,
            f"[{len(targets)}, 2], with chosen [{len(targets)}]",
            "merge all shares first",
        )
    return portable.finish(pairs, chosen, targets)


@torch.no_grad()
def backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    spans: Tensor,
    temperature: float,
    cut: Cut,
    of: int = 0,
    *,
    want_hidden: bool = True,
    want_weight: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the share's part of dhidden [T, K], in fp32 and not rounded, and dweight of the share's words.

    The parts of all shares, merged by the tree and rounded once to the dtype of hidden, are dhidden. dweight is not
    rounded if the samples are a share. A result that is not wanted has no defined value.
    """
    check_problem(hidden, weight, targets, temperature, cut)
    check_backward(grad, hidden, stats, spans)
    samples = whole_samples(hidden, spans, of if want_weight else 0)
    ids = targets.to(torch.int64).contiguous()
    if dispatch.is_native(hidden.dtype):
        return torch.ops.isobit.linear_logprob_shard_backward(  # type: ignore[no-any-return]
            grad,
            hidden,
            weight,
            ids,
            stats.contiguous(),
            spans.contiguous(),
            float(temperature),
            want_hidden,
            want_weight,
            of,
            cut.extent,
            cut.start,
        )
    shard_backward = keeping_subnormals(portable.shard_backward)
    return shard_backward(grad, hidden, weight, ids, stats, samples, float(temperature), cut)


def check_problem(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cut: Cut
) -> None:
    """Raise as linear_logprob does, where the rows of the weight are those of the share."""
    check_tensors(hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    if hidden.dim() != 2:
        refuse_shape(
            "hidden", hidden, "[T, K]", "pass hidden.reshape(-1, K), and targets.reshape(-1)"
        )
    if len(weight) != cut.length:
        expected = f"[{cut.length}, K], one of {cut.parts} shares of {cut.extent} words"
        refuse_shape(
            "weight",
            weight,
            expected,
            "slice the vocabulary from cut.start to cut.start + cut.length",
        )
    check_targets(hidden, cut.extent, targets)
    check_temperature(temperature)


def check_backward(grad: Tensor, hidden: Tensor, stats: Tensor, spans: Tensor) -> None:
    """Raise unless grad and stats have one entry per token, in the accumulation dtype."""
    wide = accumulation_dtype(hidden.dtype)
    if grad.shape != hidden.shape[:1] or stats.shape != (len(hidden), 2):
        expected = f"[{len(hidden)}], with stats [{len(hidden)}, 2]"
        refuse_shape(
            "grad", grad, expected, "pass one number per token, and what `finish` returned"
        )
    if grad.dtype != wide or stats.dtype != wide or spans.dtype != torch.int64:
        raise ArgumentError(
            expected=f"grad and stats of {wide}, spans of torch.int64",
            received=f"{grad.dtype}, {stats.dtype}, {spans.dtype}",
            remedy="pass the gradient of the log-probabilities, what `finish` returned, and isobit's spans",
        )
