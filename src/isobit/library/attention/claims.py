"""What attention-kernel-v1 claims beyond the library: one fold for all callers, samples, blindness, hulls, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.errors import UnsupportedError
from isobit.library.attention.planted import portable_attention, stock
from isobit.library.attention.proofs import error_bound, share_bound
from isobit.library.linear.claims import moved
from isobit.machine import thread_count
from isobit.ops.attention import portable
from isobit.order.plan import ATTENTION_BLOCK
from isobit.order.samples import Samples

Subject = Callable[..., Tensor]

CHUNKS, DECODED = (7, 64, 100), 100
LENGTHS, WIDTH = (11, 16, 13, 66, 19), 70
DEPTH = 16
NARROW = 2.0**-8 + 2.0**-16  # a weight and an output rounded to 8 bits


Predicate = Callable[[Any, Case, Tally], None]


def on_one_thread(predicate: Predicate) -> Predicate:
    """Calls this small only lose by a second thread; where threads are the question, the predicate asks for them."""

    @wraps(predicate)
    def held(subject: Any, case: Case, tally: Tally) -> None:
        with thread_count(1):
            predicate(subject, case, tally)

    return held


@on_one_thread
def decode_is_prefill(subject: Subject, case: Case, tally: Tally) -> None:
    """Queries one by one, and in chunks, over the keys so far, are the queries of a prefill."""
    q, k, v = case.arguments.values()
    with thread_count(2):
        whole = subject(q, k, v, **case.options)
    tally.count(len(q) * q.shape[1])
    for at in sorted(torch.randperm(len(q), generator=case.generator(60))[:DECODED].tolist()):
        one = subject(q[at : at + 1], k[: at + 1], v[: at + 1], **case.options)
        tally.same(one, whole[at : at + 1], f"query {at} decoded")
    for size in CHUNKS:
        ends = [(at, min(at + size, len(q))) for at in range(0, len(q), size)]
        parts = [subject(q[at:end], k[:end], v[:end], **case.options) for at, end in ends]
        tally.same(torch.cat([whole[:0], *parts]), whole, f"in chunks of {size}")


# ---- samples --------------------------------------------------------------------------------------------


def forward_and_gradients(subject: Subject, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """y, dq, dk, dv of (q, k, v, upstream gradient)."""
    *given, grad = tensors
    leaves = [t.detach().requires_grad_() for t in given]
    with torch.enable_grad():
        y = subject(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def placed(case: Case, packed: Tensor, described: Samples, stream: int) -> Tensor:
    """Packed rows put where samples lie, among random rows."""
    room = case.draw((described.rows, *packed.shape[1:]), stream, "wide")
    at = 0
    for start, length in described.spans:
        room[start : start + length] = packed[at : at + length]
        at += length
    return room


def taken(rows: Tensor, described: Samples) -> Tensor:
    """The samples' rows, packed again."""
    return torch.cat([rows[start : start + length] for start, length in described.spans])


@on_one_thread
def samples_are_alone(subject: Subject, case: Case, tally: Tally) -> None:
    """A sample's y, dq, dk and dv: alone, packed, padded, stored elsewhere and otherwise, by any number of threads."""
    heads, total = case.sizes["heads"], sum(LENGTHS)
    tensors = [case.draw((total, heads, DEPTH), 70 + i, "normal") for i in range(4)]
    tally.count(total * heads)
    at, alone = 0, []
    for length in LENGTHS:
        alone.append(
            forward_and_gradients(subject, [t[at : at + length] for t in tensors], **case.options)
        )
        at += length
    whole = [torch.cat(parts) for parts in zip(*alone, strict=True)]

    def compare(tensors: list[Tensor], described: Samples, where: str) -> None:
        found = forward_and_gradients(
            subject, tensors, q_samples=described, k_samples=described, **case.options
        )
        for name, left, right in zip(("y", "dq", "dk", "dv"), found, whole, strict=True):
            tally.same(taken(left, described), right, f"{name} {where}")

    described = Samples.packed(LENGTHS)
    for where, lying in {
        "packed": described,
        "padded left": Samples.padded(LENGTHS, width=WIDTH, side="left"),
        "padded right": Samples.padded(LENGTHS, width=WIDTH),
        "stored in reverse": Samples(*moved(described)),
    }.items():
        compare([placed(case, t, lying, 80 + i) for i, t in enumerate(tensors)], lying, where)
    for name, store in LAYOUTS.items():
        compare([store(t) for t in tensors], described, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(tensors, described, f"by {threads} threads")


@on_one_thread
def unseen_is_nothing(subject: Subject, case: Case, tally: Tally) -> None:
    """Keys and values that a query does not see may be anything: later, before its window, of another sample."""
    q, k, v = case.arguments.values()
    half, window, tokens = len(q) // 2, 3, len(q)
    tally.count(tokens * q.shape[1])
    if not tokens:
        return
    known = Samples.packed([tokens, tokens])
    clean, windowed = subject(q, k, v), subject(q, k, v, window=window)
    tally.same(subject(q, k, v, window=tokens), clean, "a window of all keys")
    for value in (torch.inf, torch.nan):
        later_k, later_v, early_k, early_v = k.clone(), v.clone(), k.clone(), v.clone()
        later_k[half:] = later_v[half:] = early_k[:half] = early_v[:half] = value
        tally.same(
            subject(q, later_k, later_v)[:half], clean[:half], f"before keys that are {value}"
        )
        first = half + window - 1
        tally.same(
            subject(q, early_k, early_v, window=window)[first:],
            windowed[first:],
            f"a window after {value}",
        )
        spoilt = torch.full_like(k, value)
        both = [torch.cat([other, mine]) for other, mine in ((q, q), (spoilt, k), (spoilt, v))]
        tally.same(
            subject(*both, q_samples=known, k_samples=known)[tokens:],
            clean,
            f"beside a sample of {value}",
        )


# ---- bounds ---------------------------------------------------------------------------------------------


def slack_of(case: Case, keys: int) -> float:
    """What rounding may add, relative to the largest value."""
    return share_bound(max(keys, 1)) + (0.0 if case.dtype == torch.float32 else NARROW)


@on_one_thread
def in_the_hull(subject: Subject, case: Case, tally: Tally) -> None:
    """Each output is between the smallest and the largest of the values that its query sees, within rounding."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    if not len(q):
        return
    y, values = subject(q, k, v).double(), v.double()
    most = values.abs().cummax(0).values.amax(-1, keepdim=True) * slack_of(case, len(k))
    tally.true(y >= values.cummin(0).values - most, "below the smallest value seen", y)
    tally.true(y <= values.cummax(0).values + most, "above the largest value seen", y)


@on_one_thread
def shares_sum_to_one(subject: Subject, case: Case, tally: Tally) -> None:
    """Values of 1 give 1, within the bound of the order; of one key, exactly."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    for is_causal in (True, False):
        y = subject(q, k, torch.ones_like(v), is_causal=is_causal).double()
        limit = slack_of(case, len(k))
        tally.true((y - 1).abs() <= limit, f"|Σ shares − 1| over {limit:.3g}", y)
    alone = subject(q[:1], k[:1], v[:1])
    tally.same(alone, v[:1] + 0.0, "one key")


@on_one_thread
def within_the_bound(subject: Subject, case: Case, tally: Tally) -> None:
    """The error against fp64 is at most the bound of the order at these scores, in units of the largest value."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    if not len(q):
        return
    exact = stock(q.double(), k.double(), v.double(), **case.options)
    reach = (
        float(torch.einsum("qhd,khd->hqk", q.double().abs(), k.double().abs()).amax()) * DEPTH**-0.5
    )
    limit = error_bound(len(k), DEPTH, reach) * float(v.double().abs().amax())
    error = (subject(q, k, v, **case.options).double() - exact).abs()
    tally.true(error <= limit, f"error over {limit:.3g}", error)


@on_one_thread
def executors_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """Both executors have the same bits."""
    q, k, v = case.arguments.values()
    tally.count(len(q) * q.shape[1])
    tally.same(
        subject(q, k, v, **case.options),
        portable_attention(q, k, v, **case.options),
        "the other executor",
    )


@on_one_thread
def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """y, dq, dk and dv have the bits of the portable executor."""
    q, k, v = case.arguments.values()
    grad, mask = (
        case.draw(tuple(q.shape), 90),
        portable.Mask(DEPTH**-0.5, True, case.options.get("window") or 0),
    )
    found = forward_and_gradients(subject, [q, k, v, grad], **case.options)
    tally.count(len(q) * q.shape[1])
    spans, lengths = torch.tensor([[0, len(q)]]), torch.tensor([len(q)])
    blocks = torch.tensor([list(range(0, len(q), ATTENTION_BLOCK))])
    y, lse = portable.attention(q, k, v, spans, blocks, lengths, mask)
    known = [y, *portable.attention_backward(portable.Saved(grad, q, k, v, y, lse), spans, mask)]
    for name, left, right in zip(("y", "dq", "dk", "dv"), found, known, strict=True):
        tally.same(left, right, f"{name} against the other executor")


# ---- refusals -------------------------------------------------------------------------------------------


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that no attention takes."""
    q = torch.ones(4, 2, DEPTH)
    yield "values of another length", (q, q, q[:3]), {}
    yield "a depth that lanes do not divide", (q[..., :12], q[..., :12], q[..., :12]), {}
    yield "keys of another depth", (q, torch.ones(4, 2, 32), torch.ones(4, 2, 32)), {}
    yield "heads that no group divides", (torch.ones(4, 3, DEPTH), q, q), {}
    yield "fewer keys than queries", (q, q[:3], q[:3]), {}
    yield "a window of none", (q, q, q), {"window": 0}
    yield "a window without an order", (q, q, q), {"window": 2, "is_causal": False}
    yield "keys of another dtype", (q, q.bfloat16(), q), {}
    yield "integers", (q.int(), q.int(), q.int()), {}
    yield "rows without heads", (q[0], q[0], q[0]), {}
    yield "samples that do not describe the rows", (q, q, q), {"k_samples": Samples.packed([3])}
    yield "more samples of keys than of queries", (q, q, q), {"k_samples": Samples.packed([2, 2])}


@on_one_thread
def refuses_gradients_of_a_cache(subject: Subject, case: Case, tally: Tally) -> None:
    """A gradient through keys without queries is refused, with a remedy: their own gradient would be lost."""
    q, k, v = (t.detach().requires_grad_() for t in case.arguments.values())
    tally.count(len(q) * q.shape[1])
    tally.compared += 1
    with torch.enable_grad():
        y = subject(q[1:], k, v)
        try:
            torch.autograd.grad(y.sum(), (q, k, v))
        except UnsupportedError as refusal:
            if "remedy" not in str(refusal):
                tally.fail("refused without a remedy")
        else:
            tally.fail("a gradient through a cache was accepted")
