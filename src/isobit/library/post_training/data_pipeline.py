"""Claims of data-pipeline-v1: `token_stream(texts, ranks, micro, epoch)`, the samples of each step, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.post_training.tokenizing import texts_of, tokenizer
from isobit.parallel.data.global_batch import GlobalBatch, GlobalBatchSampler

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
        whole: Any = range(len(ids) // GLOBAL * GLOBAL)
        sampler = torch.utils.data.DistributedSampler[Any](whole, ranks, rank, seed=3)
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
