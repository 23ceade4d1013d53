"""Claims of delta-rule-v1: every cut, crop and place of a sample, errors and gradients; and wrong rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.errors import UnsupportedError
from isobit.library import refused_calls
from isobit.library.claims import (
    forward_and_gradients,
    gradients,
    in_every_storage_and_thread_count,
    must_raise,
    on_one_thread,
    placements,
    put_among_random,
    replaced,
    rows_of,
    with_backward,
)
from isobit.ops.delta_rule import portable, reference
from isobit.ops.delta_rule.op import DeltaState, delta_rule
from isobit.ops.delta_rule.portable import CHUNK
from isobit.order.samples import Samples

HEADS, VALUE = 4, 12
CUTS = ((1,), (7,), (100,), (63, 1, 1, 64, 71), (5, 59, 1, 30))
LENGTHS = (66, 1, 0, 3)
TWICE = 2.0  # of the error of stock's chunk form


@dataclass(frozen=True)
class Rule:
    """A delta rule, with the arguments of isobit.delta_rule, and the state that it carries."""

    compute: Callable[..., Tensor]
    make: Callable[..., Any] = DeltaState

    def __call__(self, q: Tensor, *rest: Tensor, **named: Any) -> Tensor:
        """Compute; without k, v, g and beta, of others that are made of q."""
        return self.compute(q, *(rest or others(q)), **named)

    def start(self, q: Tensor, samples: int = 1) -> Any:
        """Return the state of samples that begin."""
        return self.make(samples, q.shape[-2], HEADS, q.shape[-1], VALUE)


def others(q: Tensor) -> tuple[Tensor, ...]:
    """Return k, v, g and beta of a call with q alone."""
    lead, size = q.shape[:-2], q.shape[:-2].numel()
    line = torch.linspace(-1, 1, size * HEADS * VALUE, device=q.device)
    line = line.reshape(*lead, HEADS, VALUE).to(q.dtype)
    return q.flip(-1), line, -line[..., 0].abs(), line[..., 1].abs()


def drawn(case: Case, rows: int, first: int = 90) -> list[Tensor]:
    """Return q, k, v, g and beta: unit keys, decays from 0 to 0.3, rates from 0 to 1."""
    shape = case.arguments["q"].shape[1:]
    q, k = (case.draw((rows, *shape), first + i).float() for i in range(2))
    q, k = (t / t.square().sum(-1, keepdim=True).add(1e-6).sqrt() for t in (q, k))
    v = case.draw((rows, HEADS, VALUE), first + 2)
    g, beta = (case.draw((rows, HEADS), first + 3 + i).float().sigmoid() for i in range(2))
    return [t.to(v.dtype) for t in (q * shape[-1] ** -0.5, k, v, g * -0.3, beta)]


@on_one_thread
def by_pieces(subject: Rule, case: Case, tally: Tally) -> None:
    """A sample in calls of many sizes, each behind the state that the last one left, has the bits of one call."""
    given = drawn(case, len(case.arguments["q"]))
    rows = len(given[0])
    whole = subject(*given)
    for cut in CUTS:
        tally.count(rows)
        state, at, number = subject.start(given[0]), 0, 0
        while at < rows:
            end = min(at + cut[number % len(cut)], rows)
            found = subject(*(t[at:end] for t in given), state=state)
            tally.same(found, whole[at:end], f"rows {at} to {end} in calls of {cut}")
            at, number = end, number + 1


@on_one_thread
def cropped(subject: Rule, case: Case, tally: Tally) -> None:
    """After tokens were dropped, a sample goes on as if they had never been; beyond the open chunk it is an error."""
    given = drawn(case, len(case.arguments["q"]))
    wrong, rows = drawn(case, 8, 95), len(given[0])
    whole = subject(*given)
    for first in (3, CHUNK - 1, CHUNK + 2, rows - 5):
        for count in (1, 5):
            if not 0 <= first < rows or first // CHUNK != (first + count) // CHUNK:
                continue  # there are fewer tokens; or those to drop close the chunk, an error, below
            tally.count(rows - first)
            state = subject.start(given[0])
            subject(*(t[:first] for t in given), state=state)
            subject(*(t[:count] for t in wrong), state=state)
            state.crop(count)
            rest = subject(*(t[first:] for t in given), state=state)
            tally.same(rest, whole[first:], f"after {count} tokens behind {first} were dropped")
    state = subject.start(given[0])
    subject(*drawn(case, CHUNK + 2), state=state)
    must_raise(partial(state.crop, 3), "a crop beyond the open chunk", tally, UnsupportedError)


@on_one_thread
def placed(subject: Rule, case: Case, tally: Tally) -> None:
    """Outputs and gradients have the bits of a sample by itself in every placement, storage and thread count."""
    described = Samples.packed(LENGTHS)
    packed = drawn(case, described.rows)
    packed.append(case.draw(tuple(packed[2].shape), 96))  # the upstream gradient
    tally.count(described.rows)

    def run(tensors: Any, where: Samples) -> list[Tensor]:
        o, grads = forward_and_gradients(subject, tensors[:5], tensors[5], samples=where)
        at = rows_of(where)
        return [t.detach()[at] for t in (o, *grads)]

    expected = run(packed, described)
    start, length = described.spans[1][0], LENGTHS[1]
    here = [t[start : start + length] for t in packed]
    for a, b in zip(run(here, Samples.packed([length])), expected, strict=True):
        tally.same(a, b[start : start + length], "a sample by itself")

    def compare(*given: Any) -> None:
        *tensors, where, name = given
        for number, (a, b) in enumerate(zip(run(tensors, where), expected, strict=True)):
            tally.same(a, b, f"{('o', 'dq', 'dk', 'dv', 'dg', 'dbeta')[number]} {name}")

    for name, where in placements(LENGTHS, 68):
        room = [put_among_random(case, t, where, 97) for t in packed]
        room[3] = -room[3].abs()  # padding decays too: only what is allowed is drawn
        compare(*room, where, name)
    in_every_storage_and_thread_count(compare, packed, described)


@on_one_thread
def accurate(subject: Rule, case: Case, tally: Tally) -> None:
    """The largest error against fp64 is at most twice that of the chunk form by stock's products."""
    given = drawn(case, len(case.arguments["q"]))
    tally.count(len(given[0]))
    q, k, v, g, beta = given
    exact = reference.delta_rule(q, k, v, g, beta)
    ours_apart, stock_apart = (
        float((rule(*given).double() - exact).abs().max()) for rule in (subject, stock)
    )
    tally.within(ours_apart, TWICE * stock_apart, exact.numel(), "error against fp64")


@on_one_thread
def differentiates(subject: Rule, case: Case, tally: Tally) -> None:
    """In fp64 every gradient is that of the definition, up to 2^20 roundings of the largest."""
    given = [t.double() for t in drawn(case, len(case.arguments["q"]))]
    tally.count(len(given[0]))
    grad = torch.linspace(-1, 1, given[2].numel(), dtype=torch.float64).reshape(given[2].shape)
    for name, ours, theirs in zip(
        ("q", "k", "v", "g", "beta"),
        gradients(subject, given, grad),
        gradients(reference.delta_rule, given, grad),
        strict=True,
    ):
        scale = float(theirs.abs().max())
        apart = float((ours - theirs).abs().max())
        tally.within(apart, 2.0**-32 * scale, theirs.numel(), f"gradient of {name}")


@on_one_thread
def equal_executors(subject: Rule, case: Case, tally: Tally) -> None:
    """The executor that serves has the portable one's bits: o, what a state leaves, and gradients."""
    given = drawn(case, len(case.arguments["q"]))
    q, k, v, g, beta = given
    rows = len(q)
    tally.count(rows)
    whole = [(0, rows)]
    tally.same(subject(*given), portable.delta_rule(q, k, v, g, beta, whole, None, [])[0], "o")
    state = subject.start(q)
    empty = torch.zeros_like(state.packed)
    for at in range(3):
        subject(*(t[at : at + 1] for t in given), state=state)
    left = portable.delta_rule(q, k, v, g, beta, [(0, 3)], empty, [0])[1]
    tally.same(state.packed, left, "the state after three tokens")
    found = gradients(subject, given, v)
    wanted = portable.delta_rule_backward(v, q, k, v, g, beta, whole)
    for name, a, b in zip(("q", "k", "v", "g", "beta"), found, wanted, strict=True):
        tally.same(a, b, f"gradient of {name}")


def refuses(subject: Rule, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    tally.count(1)
    for what, given, named in refused_calls.delta_rule():
        must_raise(partial(subject, *given, **named), what, tally)


ours = Rule(delta_rule)


# ---- planted --------------------------------------------------------------------------------------------------


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Any:
    """Return o and the state after rows, token by token with torch's sums, as stock decodes. s is [H, Dk, Dv]."""
    repeats, o = v.shape[1] // q.shape[1], []
    q, k = (t.repeat_interleave(repeats, 1).float() for t in (q, k))
    for t in range(len(q)):
        s = s * g[t].float().exp()[:, None, None]
        wrong = (v[t].float() - (s * k[t][..., None]).sum(1)) * beta[t].float()[:, None]
        s = s + k[t][..., None] * wrong[:, None]
        o.append((s * q[t][..., None]).sum(1))
    return torch.stack(o).to(v.dtype), s


def by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Any:
    """Return o and the state after rows by torch's products, with a solved system per 64 rows, as stock prefills."""
    repeats, found, dtype = v.shape[1] // q.shape[1], [], v.dtype
    q, k = (t.repeat_interleave(repeats, 1) for t in (q, k))
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    g, beta = g.float().t(), beta.float().t()
    for at in range(0, q.shape[1], CHUNK):
        here = slice(at, at + CHUNK)
        kk, qq, c = k[:, here], q[:, here], g[:, here].cumsum(1)
        decay = (c[:, :, None] - c[:, None]).tril().exp().tril()
        rate, e = beta[:, here, None], c.exp()[..., None]
        system = (rate * kk) @ kk.mT * decay
        right = rate * v[:, here] - (rate * kk * e) @ s
        new = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        found.append((qq * e) @ s + (qq @ kk.mT * decay) @ new)
        rest = (c[:, -1:] - c).exp()[..., None]
        s = s * e[:, -1:] + (kk * rest).mT @ new
    return torch.cat(found, 1).transpose(0, 1).to(dtype), s


@Rule
def stock(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, samples: Any = None, state: Any = None
) -> Tensor:
    """Prefill by chunks of the call, decode by the recurrence, and know no samples, as transformers does."""
    empty = torch.zeros(v.shape[1], q.shape[2], v.shape[2])
    before = empty if state is None else getattr(state, "matrix", empty)
    run = by_recurrence if len(q) == 1 else by_chunks
    o, after = run(q, k, v, g, beta, before)
    if state is not None:
        state.matrix = after
    return o  # type: ignore[no-any-return]


@Rule
def decodes_by_the_recurrence(*given: Tensor, state: Any = None, **named: Any) -> Tensor:
    """Decode single tokens with torch's sums, from the state that the open chunk would leave."""
    if state is None or len(given[0]) > 1:
        return delta_rule(*given, state=state, **named)
    matrix = getattr(state, "matrix", torch.zeros(HEADS, given[0].shape[2], VALUE))
    o, state.matrix = by_recurrence(*given, matrix)  # type: ignore[call-arg]
    state.packed = state.packed + 0.0
    return o  # type: ignore[no-any-return]


@Rule
def chunks_of_the_call(*given: Tensor, state: Any = None, **named: Any) -> Tensor:
    """Begin a chunk with each call, wherever the sample is."""
    if state is None:
        return delta_rule(*given, **named)
    q, k, v, g, beta = given
    sizes, rows = state.sizes, portable.heads_first(q, k, v, g, beta)
    packed = portable.unpack(state.packed[0], sizes)
    o, chunk = portable.advance(portable.read(packed, 0, sizes), rows)
    portable.write(packed, portable.close(chunk) if chunk.keys.shape[1] else chunk, sizes)
    return o.transpose(0, 1).to(v.dtype)


@Rule
def forgets_the_open_chunk(*given: Tensor, state: Any = None, **named: Any) -> Tensor:
    """Carry the state at the chunk's start, and none of its rows, as a cache of one matrix does."""
    o = delta_rule(*given, state=state, **named)
    if state is not None:
        state.counts = [count // CHUNK * CHUNK for count in state.counts]
    return o


@Rule
def leaks_between_samples(*given: Tensor, samples: Any = None, **named: Any) -> Tensor:
    """Carry the state from one packed sample into the next."""
    return delta_rule(*given, **named)


@Rule
def gradient_leaks(*given: Tensor, samples: Any = None, **named: Any) -> Tensor:
    """Carry the gradient of the state from one packed sample into the one before."""
    return with_backward(
        partial(delta_rule, samples=samples, **named),
        lambda grad, *leaves: gradients(delta_rule, leaves, grad),
        *given,
    )


@Rule
def wrong_decay_at_the_edge(*given: Tensor, **named: Any) -> Tensor:
    """Decay the state at a chunk's edge by one token less."""

    def close(chunk: portable.Chunk) -> portable.Chunk:
        after = right_close(chunk)
        return replace(after, state=after.state * (-chunk.logs[:, -1:]).exp()[..., None])

    right_close, spans = portable.close, [(0, len(given[0]))]
    with replaced(portable, "close", close):
        return portable.delta_rule(*given, spans, None, [])[0]  # type: ignore[call-arg, arg-type]


@Rule
def without_correction(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> Tensor:
    """Add β k ⊗ v, without what the state holds already."""
    return delta_rule(q, k * 2.0**-20, v, g, beta) * 2.0**20


@Rule
def in_16_bits(*given: Tensor, state: Any = None, **named: Any) -> Tensor:
    """Compute in bf16, with a relative error that shows in every dtype."""
    o = delta_rule(*given, state=state, **named)
    return o + (o.bfloat16() * (1 + 2.0**-6)).to(o.dtype).detach() - o.detach()


@Rule
def decay_without_gradient(*given: Tensor, **named: Any) -> Tensor:
    """Take the decays as constants."""
    q, k, v, g, beta = given
    return delta_rule(q, k, v, g.detach(), beta, **named) + 0.0 * g[..., None]


@Rule
def first_head_of_a_group(*given: Tensor, **named: Any) -> Tensor:
    """Deliver to a head of keys the gradient of the first of the heads that read it."""

    def backward(grad: Tensor, *leaves: Tensor) -> list[Tensor]:
        first = torch.zeros_like(grad)
        repeats = grad.shape[-2] // leaves[0].shape[-2]
        first[..., ::repeats, :] = grad[..., ::repeats, :]
        part, whole = (gradients(delta_rule, leaves, g, **named) for g in (first, grad))
        return [*part[:2], *whole[2:]]

    return with_backward(partial(delta_rule, **named), backward, *given)


class Stale(DeltaState):
    """Keeps the rows of tokens that were dropped."""

    def crop(self, tokens: int) -> None:
        """Drop nothing."""
        if tokens > self.counts[0] % CHUNK:
            super().crop(tokens)


class Unbounded(DeltaState):
    """Drops what it has of more tokens than the open chunk has."""

    def crop(self, tokens: int) -> None:
        """Drop the open chunk's at most."""
        super().crop(min(tokens, self.counts[0] % CHUNK))


def careless_rule(*given: Any, **_: Any) -> Tensor:
    """Take every call."""
    return torch.zeros_like(given[2])


stale_open_chunk = Rule(delta_rule, Stale)
crops_beyond_the_chunk = Rule(delta_rule, Unbounded)
careless = Rule(careless_rule)
