"""Planted operators of a small causal model that differ between prefill, chunks and cached tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.records import ERROR, ORDER
from isobit.integrations.transformers.package import library
from isobit.library.audit.plants import products
from isobit.library.audit.plants.plant import Function, Inputs, Plant, draw, operator
from isobit.library.audit.plants.products import chained
from isobit.ops.attention.op import attention
from isobit.ops.embedding.op import embedding
from isobit.ops.linear.op import linear

VOCABULARY, WIDTH, TOKENS, SAMPLES, BLOCK = 64, 16, 13, 4, 4


def attended(q: Tensor, k: Tensor, v: Tensor, first: int = 0, size: int = BLOCK) -> Tensor:
    """Compute causal attention of q [B, T, D] to k, v [B, S, D].

    Keys are added in blocks of `size`, the block of key `first` first. Keys that a query does not see add zeros at the
    end, which change no bit.
    """
    queries, keys = q.shape[1], k.shape[1]
    scores = products.chain(q[:, :, None] * k[:, None]) * q.shape[-1] ** -0.5
    places = torch.arange(keys, device=q.device)
    seen = places <= torch.arange(keys - queries, keys, device=q.device)[:, None]
    scores = torch.where(seen, scores, torch.full_like(scores, -torch.inf))
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).roll(-first, -1)
    values = last_axis(v).roll(-first, -1)[:, None]
    total = products.in_blocks(weights[:, :, None] * values, size)
    return total / products.in_blocks(weights, size)[..., None]


def last_axis(v: Tensor) -> Tensor:
    """Return [B, S, D] as [B, D, S], to add over keys."""
    return v.transpose(1, 2)


@operator("decode_order")
def decode_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take other blocks of keys for a single query, as a split over the cache does."""
    return attended(q, k, v, size=BLOCK if q.shape[1] > 1 else 3)


@operator("lost_key")
def lost_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Miss the newest key of a single query."""
    if q.shape[1] > 1 or k.shape[1] == 1:
        return attended(q, k, v)
    return attended(q, k[:, :-1], v[:, :-1])


@operator("chunk_order")
def chunk_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Begin with the keys of the chunk, then add those of the cache."""
    return attended(q, k, v, first=k.shape[1] - q.shape[1])


@operator("lost_boundary")
def lost_boundary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Skip the last key before the chunk."""
    before = k.shape[1] - q.shape[1]
    if not before:
        return attended(q, k, v)
    kept = [at for at in range(k.shape[1]) if at != before - 1]
    return attended(q, k[:, kept], v[:, kept])


def turned(x: Tensor, places: Tensor) -> Tensor:
    """Scale features by a function of positions [B, T]."""
    return x * torch.cos(places[..., None].to(x.dtype) * 0.3)


@operator("off_by_one")
def off_by_one(x: Tensor, places: Tensor) -> Tensor:
    """Count one position too many for a single token."""
    return turned(x, places + (1 if x.shape[1] == 1 else 0))


@operator("matrix_vector", lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0])))
def matrix_vector(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply a single token by another kernel."""
    return (
        chained(x, weight) if x.shape[1] > 1 else products.in_lanes(products.terms_of(x, weight), 8)
    )


class Weighted(nn.Module):
    """A linear layer, isobit's unless told otherwise."""

    def __init__(self, inputs: int, outputs: int, seed: int, call: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(outputs, inputs, seed=seed, spread=2) * inputs**-0.5)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.call(x, self.weight)
        return y


class Calling(nn.Module):
    """A module that calls one function."""

    def __init__(self, call: Function) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> Tensor:
        y: Tensor = self.call(*given)
        return y


def right_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of one head by isobit."""
    one = [rows.unsqueeze(2) for rows in (q, k, v)]
    return attention(one[0], one[1], one[2], is_causal=True).squeeze(2)


class CausalNet(nn.Module):
    """A causal model of one layer that takes and returns a cache as the models of transformers do."""

    def __init__(
        self,
        attend: Function = right_attention,
        turn: Function = turned,
        out: Function = linear,
    ) -> None:
        super().__init__()
        self.embedding = nn.Parameter(draw(VOCABULARY, WIDTH, seed=30, spread=1))
        self.qkv = Weighted(WIDTH, 3 * WIDTH, 31, linear)
        self.turn, self.attend = Calling(turn), Calling(attend)
        self.out = Weighted(WIDTH, WIDTH, 32, out)
        self.head = Weighted(WIDTH, VOCABULARY, 33, linear)
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        **_: Any,
    ) -> Any:
        transformers = library()
        if use_cache and past_key_values is None:
            past_key_values = transformers.DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        places = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        x = embedding(input_ids, self.embedding)
        x = self.turn(x, places.expand(input_ids.shape))
        q, k, v = self.qkv(x).chunk(3, -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k[:, None], v[:, None], 0)
            k, v = k[:, 0], v[:, 0]
        x = x + self.out(self.attend(q, k, v))
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=self.head(x), past_key_values=past_key_values if use_cache else None
        )


def tokens() -> Inputs:
    """Return random ids [samples, tokens]."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def cached(
    name: str, wrong: Function, module: str, axis: str = "decode", kind: str = ORDER
) -> Plant:
    """Return the plant of one operator in a module of a `CausalNet`."""

    def make(faulty: bool) -> nn.Module:
        given: dict[str, Callable[..., Any]] = {module: wrong} if faulty else {}
        return CausalNet(**given)

    return Plant(name, make, tokens, f"planted::{name}", module, axis, kind)


PLANTS: tuple[Plant, ...] = (
    cached("decode_order", decode_order, "attend"),
    cached("lost_key", lost_key, "attend", kind=ERROR),
    cached("off_by_one", off_by_one, "turn", kind=ERROR),
    cached("matrix_vector", matrix_vector, "out"),
    cached("chunk_order", chunk_order, "attend", axis="chunks"),
    cached("lost_boundary", lost_boundary, "attend", axis="chunks", kind=ERROR),
)
