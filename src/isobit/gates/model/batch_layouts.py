"""The batch layouts: padding, packing, order, caches and threads that must not change any bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from isobit.foundation.machine import thread_count
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.scoring import logprobs
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.op import IGNORED
from isobit.sampling.dropout import dropout_key

# The samples of the batch-layout gate, and the batches that contain them.

LENGTHS = (11, 16, 13, 19)
PROMPT = 8  # tokens
CHUNK = 7  # tokens per call when a cache is used
WIDTH = 20  # of a padded row
PERMUTATION = (2, 0, 3, 1)
SELECTED = sum(LENGTHS) - len(LENGTHS)  # every token but a sample's first has a log-probability
TRAINED = sum(LENGTHS) - PROMPT * len(LENGTHS)  # only tokens after the prompt have a loss


@dataclass(frozen=True)
class Batch:
    """Samples laid out in [B, T]: position p of sample s is row spans[s][0] + p of the B·T."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T], 1 for tokens, 0 for padding
    positions: Tensor  # [B, T]
    packed: bool  # several samples in one row
    spans: dict[int, tuple[int, int]]  # by sample: its first of the B·T rows, and its length
    prompt: int = PROMPT  # tokens at the front of each sample that have no label

    def gather(self, values: Tensor) -> dict[int, Tensor]:
        """Return the rows of each sample from values of shape [B, T, ...]."""
        flat = values.reshape(-1, *values.shape[2:])
        return {
            sample: flat[start : start + length] for sample, (start, length) in self.spans.items()
        }

    def labels(self) -> Tensor:
        """Return labels [B, T] for transformers: the tokens after the prompt, -100 elsewhere."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            held = slice(start + self.prompt, start + length)
            spread[held] = self.ids.reshape(-1)[held]
        return spread.reshape(self.ids.shape)

    def targets(self) -> Tensor:
        """Return targets [B, T]: the next token of the sample, -100 if there is none."""
        spread = torch.full_like(self.ids, IGNORED).reshape(-1)
        for start, length in self.spans.values():
            last = start + length - 1
            spread[start:last] = self.ids.reshape(-1)[start + 1 : last + 1]
        return spread.reshape(self.ids.shape)


def draw_samples(vocabulary: int, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Draw random tokens for samples of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def padded(
    samples: list[Tensor], side: str, *, order: Sequence[int] = range(4), width: int = WIDTH
) -> Batch:
    """Return a batch with one row per sample, padded on the left or the right."""
    device = samples[0].device
    ids = torch.zeros(len(order), width, dtype=torch.int64, device=device)
    mask, positions, spans = torch.zeros_like(ids), torch.zeros_like(ids), {}
    for row, sample in enumerate(order):
        length = len(samples[sample])
        start = width - length if side == "left" else 0
        held = slice(start, start + length)
        ids[row, held], mask[row, held] = samples[sample], 1
        positions[row, held] = torch.arange(length, device=device)
        spans[sample] = (row * width + start, length)
    return Batch(ids, mask, positions, False, spans)


def alone(samples: list[Tensor], sample: int) -> Batch:
    """Return a batch of one sample."""
    ids = samples[sample][None]
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return Batch(ids, None, positions, False, {sample: (0, ids.shape[1])})


def packed(samples: list[Tensor]) -> Batch:
    """Return all samples in one row; positions restart at 0 where a sample begins."""
    positions = torch.cat([torch.arange(len(own), device=own.device) for own in samples])
    spans, at = {}, 0
    for index, sample in enumerate(samples):
        spans[index] = (at, len(sample))
        at += len(sample)
    return Batch(torch.cat(samples)[None], None, positions[None], True, spans)


# The two sides of the batch-layout gate: a model with isobit enabled, and stock.


class Scorer(Protocol):
    """How one side computes log-probabilities and the loss."""

    name: str
    model: Any

    def logprobs(self, batch: Batch, columns: slice, cache: Any) -> Tensor:
        """Return log p of the token that follows each, [B, columns]."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the training loss."""

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return log p of tokens from the logits that `generate` saw."""


class IsobitScorer:
    """A model with isobit enabled, which computes the positions of padded samples itself."""

    name = "isobit"

    def __init__(self, model: Any) -> None:
        """Score with a model on which isobit is enabled."""
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """Compute log p by `isobit.logprobs`."""
        return logprobs(
            self.model,
            batch.ids[:, columns],
            None if batch.mask is None else batch.mask[:, : columns.stop],
            batch.positions if batch.packed else None,
            targets=batch.targets()[:, columns],
            past_key_values=cache,
        )

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss by the model with labels."""
        with dropout_key(seed=0, step=0):  # every layout is the same step of the same samples
            found = self.model(
                batch.ids,
                attention_mask=batch.mask,
                position_ids=batch.positions if batch.packed else None,
                labels=batch.labels(),
                use_cache=False,
            )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute log p by `isobit.log_softmax`."""
        return log_softmax(logits).gather(-1, tokens[..., None])[..., 0]


class StockScorer:
    """The model as transformers runs it, with the correct positions for padded samples."""

    name = "stock"

    def __init__(self, model: Any) -> None:
        """Score with a model of transformers."""
        self.model = model

    def logprobs(self, batch: Batch, columns: slice, cache: Any = None) -> Tensor:
        """Compute log p by log_softmax of the logits in fp32."""
        logits = self.model(
            batch.ids[:, columns],
            attention_mask=None if batch.mask is None else batch.mask[:, : columns.stop],
            position_ids=batch.positions[:, columns],
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
        targets = batch.targets()[:, columns]
        return self.of_logits(logits, targets.clamp_min(0)).masked_fill(targets == IGNORED, 0)

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss by the model with labels."""
        found = self.model(
            batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            labels=batch.labels(),
            use_cache=False,
        )
        return found.loss  # type: ignore[no-any-return]

    def of_logits(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute log p by torch.log_softmax in fp32."""
        return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]


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
