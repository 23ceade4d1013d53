"""The layouts of the gate: each yields the same log-probabilities, or the same gradients, by another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from isobit.gates.model.fixture import (
    CHUNK,
    LENGTHS,
    PERMUTATION,
    PROMPT,
    WIDTH,
    Batch,
    alone,
    packed,
    padded,
)
from isobit.gates.model.scorers import Scorer
from isobit.integrations.transformers.package import library
from isobit.machine import thread_count

GENERATED = 6


def selected_layouts(samples: list[Tensor]) -> dict[str, Callable[[Scorer], Tensor]]:
    """By name: functions to the log-probabilities of all samples, in order of (sample, position)."""
    right, left = padded(samples, "right"), padded(samples, "left")
    single = [alone(samples, i) for i in range(len(samples))]
    decode = [PROMPT, *[1] * (WIDTH - PROMPT)]
    return {
        "4 × B=1": partial(score, single),
        "B=4, padded right": partial(score, [right]),
        "B=4, padded left": partial(score, [left]),
        f"B=4, permuted {list(PERMUTATION)}": partial(
            score, [padded(samples, "right", order=PERMUTATION)]
        ),
        "packed in one row": partial(score, [packed(samples)]),
        f"cache, 4 × B=1, chunks of {CHUNK}": partial(score_cached, single, [CHUNK] * 3),
        f"cache, padded left, chunks of {CHUNK}": partial(score_cached, [left], [CHUNK] * 3),
        "cache, padded left, token by token": partial(score_cached, [left], [1] * WIDTH),
        f"cache, prompt of {PROMPT}, then token by token": partial(score_cached, [right], decode),
        "1 thread": partial(on_threads, 1, partial(score, [right])),
        "2 threads": partial(on_threads, 2, partial(score, [right])),
    }


def trained_layouts(samples: list[Tensor]) -> dict[str, Callable[[Scorer], Tensor]]:
    """By name: functions that leave gradients and return the loss; all hold the global batch in one order.

    A permuted batch is another global order, and micro-batches are merged by their own operator: neither is here.
    """
    right, left = padded(samples, "right"), padded(samples, "left")
    return {
        "B=4, padded right": partial(train, right),
        "B=4, padded left": partial(train, left),
        "packed in one row": partial(train, packed(samples)),
        "gradient checkpointing": partial(train_checkpointed, right),
        "1 thread": partial(on_threads, 1, partial(train, right)),
        "2 threads, padded left": partial(on_threads, 2, partial(train, left)),
    }


@torch.no_grad()
def score(batches: Sequence[Batch], scorer: Scorer) -> Tensor:
    """One forward for each batch."""
    return in_order(
        (batch, scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None)) for batch in batches
    )


@torch.no_grad()
def score_cached(batches: Sequence[Batch], chunks: Sequence[int], scorer: Scorer) -> Tensor:
    """Chunk by chunk, behind a cache."""
    return in_order((batch, through_cache(scorer, batch, chunks)) for batch in batches)


def through_cache(scorer: Scorer, batch: Batch, chunks: Sequence[int]) -> Tensor:
    """[B, T] as `logprobs` gives it, of columns taken by these chunks."""
    cache, at, parts = library("cache_utils").DynamicCache(), 0, []
    for chunk in chunks:
        stop = min(at + chunk, batch.ids.shape[1])
        if stop > at:
            parts.append(scorer.logprobs(batch, slice(at, stop), cache))
        at = stop
    return torch.cat(parts, dim=1)


def in_order(found: Iterator[tuple[Batch, Tensor]]) -> Tensor:
    """[selected]: sample by sample, each without its last row, which no token follows."""
    by_sample: dict[int, Tensor] = {}
    for batch, values in found:
        by_sample.update(batch.gather(values))
    return torch.cat([by_sample[i][:-1] for i in range(len(LENGTHS))])


@torch.no_grad()
def generate_and_score(samples: list[Tensor], scorer: Scorer) -> tuple[Tensor, Tensor]:
    """log p of generated tokens as `generate` saw them behind left padding and a cache; and as scored afterwards."""
    prompts = padded(samples, "left", width=max(LENGTHS))
    made = scorer.model.generate(
        prompts.ids,
        attention_mask=prompts.mask,
        max_new_tokens=GENERATED,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[:, -GENERATED:]
    rolled = scorer.of_logits(torch.stack(made.logits, dim=1), tokens)
    whole = [torch.cat((sample, tokens[i])) for i, sample in enumerate(samples)]
    batch = padded(whole, "right", width=max(LENGTHS) + GENERATED + 1)
    values = batch.gather(scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None))
    again = torch.stack([values[i][-GENERATED - 1 : -1] for i in range(len(samples))])
    return rolled, again


def train(batch: Batch, scorer: Scorer) -> Tensor:
    """Forward and backward; gradients stay in the model."""
    scorer.model.zero_grad(set_to_none=True)
    scorer.model.train()
    try:
        loss = scorer.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        scorer.model.eval()
    return loss.detach()


def train_checkpointed(batch: Batch, scorer: Scorer) -> Tensor:
    """The same, with every layer run again in backward."""
    scorer.model.gradient_checkpointing_enable()
    try:
        return train(batch, scorer)
    finally:
        scorer.model.gradient_checkpointing_disable()


def on_threads(count: int, run: Callable[[Scorer], Tensor], scorer: Scorer) -> Tensor:
    """The same, on this many threads."""
    with thread_count(count):
        return run(scorer)
