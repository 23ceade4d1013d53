"""Claims of distill-loss-v1, data-pipeline-v1 and post-training-v1: what single parts promise, still true of the whole.

`distil(hidden, weight, teacher_hidden, teacher_weight, micro)` is one step; `token_stream(texts, ranks, micro)` the
samples of each step of an epoch; `derive(base, a, b)` a model that is merged, pruned and quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.post_training.merging import merge, mergekit
from isobit.library.post_training.pruning import prune, wanda_magnitude
from isobit.library.post_training.quantising import (
    per_element,
    quantize,
    torch_dynamic,
    without_zero_point,
)
from isobit.library.post_training.tokenizing import texts_of, tokenizer
from isobit.ops.distillation.loss import distillation_loss
from isobit.ops.linear.op import linear_fp32
from isobit.order.samples import Samples
from isobit.parallel.data.global_batch import GlobalBatch, GlobalBatchSampler
from isobit.parallel.data.gradients import Gradients

SAMPLES, TOKENS = 8, 4  # of the step of a distillation
OPTIONS: dict[str, Any] = {"temperature": 2.0, "alpha": 0.7}
Step = Callable[..., tuple[Tensor, Tensor]]


class Head(torch.nn.Module):
    """A student of one layer, its head."""

    def __init__(self, weight: Tensor) -> None:
        """Start from a weight [V, K]."""
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().clone())


@torch.enable_grad()
def distil(
    hidden: Tensor,
    weight: Tensor,
    known: Tensor,
    head: Tensor,
    micro: int = 1,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens, and the gradient of the student's head, of one step in micro-batches."""
    hidden, known = whole_step(hidden), whole_step(known)
    model = Head(weight)
    gradients = Gradients(model, GlobalBatch(SAMPLES, micro_batches=micro))
    losses = []
    for index in range(micro):
        rows = slice(index * len(hidden) // micro, (index + 1) * len(hidden) // micro)
        teacher = linear_fp32(known[rows], head) if stored else (known[rows], head)
        with gradients.micro_batch(index) as share:
            lengths = [TOKENS] * (SAMPLES // micro)
            samples = Samples.packed(lengths, first=share.first, total=share.total)
            given = hidden[rows], model.weight, teacher, targets_of(hidden, len(weight))[rows]
            each = distillation_loss(*given, reduction="none", samples=samples, **OPTIONS)
            (each.sum() / len(hidden)).backward()
        losses.append(each.detach())
    assert model.weight.grad is not None
    return torch.cat(losses), model.weight.grad


def whole_step(rows: Tensor) -> Tensor:
    """Return the tokens of all samples; rows are repeated or left out until there are as many."""
    return rows[torch.arange(SAMPLES * TOKENS) % len(rows)]


def targets_of(hidden: Tensor, words: int) -> Tensor:
    """Return a target for each token."""
    return torch.arange(len(hidden)) % words


def one_step(subject: Step, case: Case, tally: Tally) -> None:
    """A step has the same losses and gradient in 1, 2, 4 and 8 micro-batches, from a live and a stored teacher."""
    given = tuple(case.arguments.values())
    tally.count(case.rows)
    wanted = subject(*given, micro=1)
    tally.true((wanted[0] >= 0).reshape(-1), "losses are not negative", wanted[0])
    for micro, stored in product((1, 2, 4, 8), (False, True)):
        found = subject(*given, micro=micro, stored=stored)
        where = f"{micro} micro-batches, {'stored' if stored else 'live'} teacher"
        for one, other, name in zip(found, wanted, ("losses", "gradient"), strict=True):
            tally.same(one, other, f"{name}, {where}")


def mean_of_means(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Divide by the micro-batch's own number of tokens."""
    losses, grad = distil(*given, micro=micro, stored=stored)
    return losses, grad * micro


def teacher_in_bf16(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Store the teacher's logits in 16 bits."""
    hidden, weight, known, head = given
    if stored:
        return distil(hidden, weight, known.bfloat16().to(known.dtype), head, micro, stored)
    return distil(hidden, weight, known, head, micro)


@torch.enable_grad()
def stock_distil(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Distil by F.kl_div and autograd's accumulation."""
    weight, head = given[1], given[3]
    hidden, known = whole_step(given[0]), whole_step(given[2])
    leaf = weight.detach().clone().requires_grad_()
    losses = []
    for index in range(micro):
        rows = slice(index * len(hidden) // micro, (index + 1) * len(hidden) // micro)
        student, teacher = F.linear(hidden[rows], leaf), F.linear(known[rows], head)
        q, p = (F.log_softmax(x.float() / OPTIONS["temperature"], -1) for x in (student, teacher))
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        chosen = targets_of(hidden, len(weight))[rows]
        plain = F.cross_entropy(student.float(), chosen, reduction="none")
        square = OPTIONS["temperature"] ** 2
        each = OPTIONS["alpha"] * square * kl + (1 - OPTIONS["alpha"]) * plain
        (each.sum() / len(hidden)).backward()
        losses.append(each.detach())
    assert leaf.grad is not None
    return torch.cat(losses), leaf.grad


# ---- from texts to the samples of a step

Stream = list[list[list[int]]]  # [steps][samples of the global batch][ids]
GLOBAL = 4  # samples of a global batch


def token_stream(texts: list[str], ranks: int, micro: int, epoch: int = 0) -> Stream:
    """Return the samples of each step of an epoch, as ranks and micro-batches see them one after the other."""
    ids = tokenizer().encode_batch(texts)
    return steps_of(
        ids, [sampler_of(len(ids), ranks, micro, rank, epoch) for rank in range(ranks)], micro
    )


def different(texts: list[str]) -> list[str]:
    """Return texts that differ from each other, for two global batches or more."""
    return [f"{i} {texts[i % len(texts)]}" for i in range(max(len(texts), 2 * GLOBAL))]


def call_stream(subject: Callable[..., Stream], *given: Any, **named: Any) -> Stream:
    """Call as claims do, or with texts of drawn numbers on one rank."""
    if isinstance(given[0], Tensor):
        return subject(different([str(row) for row in given[0].tolist()]), 1, 1)
    return subject(*given, **named)


def sampler_of(length: int, ranks: int, micro: int, rank: int, epoch: int) -> list[list[int]]:
    """Return the micro-batches of a rank, as indices of samples."""
    batch = GlobalBatch(GLOBAL, ranks=ranks, micro_batches=micro)
    sampler = GlobalBatchSampler(length, batch, rank, seed=3, drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


def steps_of(ids: list[list[int]], by_rank: list[list[list[int]]], micro: int) -> Stream:
    """Put the micro-batches of all ranks of each step one after the other."""
    return [
        [ids[i] for mine in by_rank for part in mine[at : at + micro] for i in part]
        for at in range(0, len(by_rank[0]), micro)
    ]


def one_stream(subject: Callable[..., Stream], case: Case, tally: Tally) -> None:
    """Every step has the same samples in the same order on 1, 2 and 4 ranks, in 1, 2 and 4 micro-batches."""
    texts = different(texts_of(case))
    tally.count(case.rows)
    wanted = subject(texts, 1, 1)
    tally.true(torch.tensor([len(step) == GLOBAL for step in wanted]), "samples of a step")
    for ranks, micro in ((1, 2), (1, 4), (2, 1), (2, 2), (4, 1)):
        found = subject(texts, ranks, micro)
        same = [a == b for a, b in zip(found, wanted, strict=False)]
        tally.true(
            torch.tensor([*same, len(found) == len(wanted)]),
            f"{ranks} ranks, {micro} micro-batches",
        )


def whole_epoch(subject: Callable[..., Stream], case: Case, tally: Tally) -> None:
    """Each sample is seen once in an epoch, with the ids that it has alone; another epoch has another order."""
    texts = different(texts_of(case))
    alone = [tuple(tokenizer().encode(text)) for text in texts]
    tally.count(case.rows)
    streams = [
        [tuple(ids) for step in subject(texts, 2, 1, epoch=e) for ids in step] for e in (0, 1)
    ]
    for stream in streams:
        tally.true(torch.tensor([ids in alone for ids in stream]), "ids of a text alone")
        tally.true(torch.tensor(len(set(stream)) == len(stream)), "samples that come twice")
        tally.true(torch.tensor(len(texts) - len(stream) < GLOBAL), "samples that are left out")
    tally.true(torch.tensor(streams[0] != streams[1]), "the order of two epochs")


def by_turns(texts: list[str], ranks: int, micro: int, epoch: int = 0) -> Stream:
    """Give rank r every ranks-th sample, as torch's DistributedSampler does."""
    ids = tokenizer().encode_batch(texts)
    size = GLOBAL // ranks // micro
    by_rank = []
    for rank in range(ranks):
        sampler = torch.utils.data.DistributedSampler(
            range(len(ids) // GLOBAL * GLOBAL), ranks, rank, shuffle=True, seed=3
        )
        sampler.set_epoch(epoch)
        mine = list(sampler)
        by_rank.append([mine[at : at + size] for at in range(0, len(mine), size)])
    return steps_of(ids, by_rank, micro)


def without_epochs(texts: list[str], ranks: int, micro: int, epoch: int = 0) -> Stream:
    """Forget to tell the sampler the epoch."""
    return token_stream(texts, ranks, micro)


def seed_of_the_rank(texts: list[str], ranks: int, micro: int, epoch: int = 0) -> Stream:
    """Shuffle on each rank by itself, so that samples come twice."""
    ids = tokenizer().encode_batch(texts)
    by_rank = [sampler_of(len(ids), ranks, micro, rank, epoch + 7 * rank) for rank in range(ranks)]
    return steps_of(ids, by_rank, micro)


def padded_to_the_longest(texts: list[str], ranks: int, micro: int, epoch: int = 0) -> Stream:
    """Count padding as tokens."""
    stream = token_stream(texts, ranks, micro, epoch)
    longest = max(len(ids) for step in stream for ids in step)
    return [[ids + [0] * (longest - len(ids)) for ids in step] for step in stream]


# ---- merged, then pruned, then quantised

Derived = tuple[Tensor, Tensor, Tensor]  # merged, pruned, and what the codes stand for


def derive(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Merge by task arithmetic, drop half of the weights, quantise to four bits."""
    return staged(base, a, b)


def staged(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    merging: Callable[..., Tensor] = merge,
    pruning: Callable[..., Tensor] = prune,
    quantising: Callable[..., Any] = quantize,
    method: str = "task_arithmetic",
) -> Derived:
    """Run the three stages."""
    merged = merging(base, a, b, method=method)
    pruned = pruning(merged, 0.5)
    codes, scale, zero = quantising(pruned)
    values = (codes.double() - per_element(pruned, zero)) * per_element(pruned, scale)
    return merged, pruned, values


def given(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return a base and two models near it, of whole groups."""
    base, a, b = (one.flatten(1) for one in case.arguments.values())
    return base, base + a / 4, base + b / 4


def zeros_survive(subject: Callable[..., Derived], case: Case, tally: Tally) -> None:
    """Half of the weights of each row are zero after the last stage; what is kept has the bits of the merge."""
    models = given(case)
    tally.count(case.rows)
    merged, pruned, values = subject(*models)
    half = merged.shape[1] // 2
    tally.true((pruned == 0).sum(-1) == half, "zeros after pruning", (pruned == 0).sum(-1))
    tally.true((values == 0)[pruned == 0], "zeros after quantising", values[pruned == 0])
    tally.same(pruned, torch.where(pruned == 0, pruned, merged), "kept weights")


def free_of_others(subject: Callable[..., Derived], case: Case, tally: Tally) -> None:
    """Threads, and tensors that are derived before, change no bit of any stage."""
    models = given(case)
    tally.count(case.rows)
    with thread_count(1):
        wanted = subject(*models)
    subject(*(one.flip(0) for one in models))
    with thread_count(2):
        found = subject(*models)
    for one, other, name in zip(found, wanted, ("merged", "pruned", "quantised"), strict=True):
        tally.same(one, other, name)


def stock_derive(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Use mergekit's DARE, a threshold, and one scale for the tensor."""
    stages: dict[str, Any] = {"merging": mergekit, "method": "dare_linear"}
    return staged(base, a, b, **stages, pruning=wanda_magnitude, quantising=torch_dynamic)


def no_code_for_zero(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Quantise without a zero point: what was pruned is no longer zero."""
    return staged(base, a, b, quantising=without_zero_point)


def merged_last(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Prune the models, and merge them then: masks differ, and their union is kept."""
    merged, _, _ = staged(base, a, b)
    pruned = merge(prune(base, 0.5), prune(a, 0.5), prune(b, 0.5), method="task_arithmetic")
    return merged, pruned, pruned.double()


CALLS = [0]


def mask_of_the_call(base: Tensor, a: Tensor, b: Tensor) -> Derived:
    """Drop by a generator that every tensor advances."""
    CALLS[0] += 1
    return staged(base, a.roll(CALLS[0], 1), b)
