"""The batch layouts: padding, packing, order, caches and threads that must not change any bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.foundation.machine import thread_count
from isobit.gates.model.batches import (
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

GENERATED = 6


def selected_layouts(
    samples: list[Tensor], few: bool = False
) -> dict[str, Callable[[Scorer], Tensor]]:
    """Return, by name, functions that score all samples in one layout.

    The log-probabilities are in order of (sample, position), so they can be compared.

    Args:
        samples: The tokens of each sample.
        few: Leave out layouts of many calls, and threads, which no kernel of a GPU has.
    """
    right, left = padded(samples, "right"), padded(samples, "left")
    single = [alone(samples, i) for i in range(len(samples))]
    decode = [PROMPT, *[1] * (WIDTH - PROMPT)]
    if few:
        return {
            "4 × B=1": partial(score, single),
            "B=4, padded left": partial(score, [left]),
            "packed in one row": partial(score, [packed(samples)]),
            f"cache, padded left, chunks of {CHUNK}": partial(score_cached, [left], [CHUNK] * 3),
        }
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


def trained_layouts(
    samples: list[Tensor], few: bool = False
) -> dict[str, Callable[[Scorer], Tensor]]:
    """Return, by name, functions that run a backward in one layout and return the loss.

    A permuted batch is not among them, since it is another global order of samples; micro-batches
    are the subject of the rank-layout gate. `few` is as for `selected_layouts`.
    """
    right, left = padded(samples, "right"), padded(samples, "left")
    whole: dict[str, Callable[[Scorer], Tensor]] = {
        "B=4, padded right": partial(train, right),
        "B=4, padded left": partial(train, left),
        "packed in one row": partial(train, packed(samples)),
    }
    if few:
        return whole
    return {
        **whole,
        "gradient checkpointing": partial(train_checkpointed, right),
        "1 thread": partial(on_threads, 1, partial(train, right)),
        "2 threads, padded left": partial(on_threads, 2, partial(train, left)),
    }


@torch.no_grad()
def score(batches: Sequence[Batch], scorer: Scorer) -> Tensor:
    """Score batches with one forward each."""
    return in_order(
        (batch, scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None)) for batch in batches
    )


@torch.no_grad()
def score_cached(batches: Sequence[Batch], chunks: Sequence[int], scorer: Scorer) -> Tensor:
    """Score batches chunk by chunk with a KV cache."""
    return in_order((batch, through_cache(scorer, batch, chunks)) for batch in batches)


def through_cache(scorer: Scorer, batch: Batch, chunks: Sequence[int]) -> Tensor:
    """Return the log-probabilities [B, T], computed in chunks of columns."""
    cache, at, parts = library("cache_utils").DynamicCache(), 0, []
    for chunk in chunks:
        stop = min(at + chunk, batch.ids.shape[1])
        if stop > at:
            parts.append(scorer.logprobs(batch, slice(at, stop), cache))
        at = stop
    return torch.cat(parts, dim=1)


def in_order(found: Iterator[tuple[Batch, Tensor]]) -> Tensor:
    """Return [selected] values sample by sample, without each last row, which no token follows."""
    by_sample: dict[int, Tensor] = {}
    for batch, values in found:
        by_sample.update(batch.gather(values))
    return torch.cat([by_sample[i][:-1] for i in sorted(by_sample)])


@torch.no_grad()
def generate_and_score(samples: list[Tensor], scorer: Scorer) -> tuple[Tensor, Tensor]:
    """Return log p of generated tokens: as `generate` saw them, and as scored afterwards.

    `generate` runs with left padding and a cache.
    """
    prompts = padded(samples, "left", width=max(LENGTHS))
    with plain_generation(scorer.model):
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


@contextmanager
def plain_generation(model: Any) -> Iterator[None]:
    """Ignore a checkpoint's generation settings: an end token would stop a sample, a penalty change its tokens."""
    own = model.generation_config
    model.generation_config = library().GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def train(batch: Batch, scorer: Scorer) -> Tensor:
    """Run forward and backward, leave the gradients in the model and return the loss."""
    scorer.model.zero_grad(set_to_none=True)
    scorer.model.train()
    try:
        loss = scorer.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        scorer.model.eval()
    return loss.detach()


def train_checkpointed(batch: Batch, scorer: Scorer) -> Tensor:
    """Do the same with gradient checkpointing."""
    scorer.model.gradient_checkpointing_enable()
    try:
        return train(batch, scorer)
    finally:
        scorer.model.gradient_checkpointing_disable()


def on_threads(count: int, run: Callable[[Scorer], Tensor], scorer: Scorer) -> Tensor:
    """Run a layout on this many threads."""
    with thread_count(count):
        return run(scorer)
