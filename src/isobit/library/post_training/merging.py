"""Claims of model-merging-kernel-v1: `merge(base, a, b, method, …)` of one tensor, a reference, and planted wrong ones.

Methods: linear and slerp of a and b; task_arithmetic, ties and dare_linear of their differences to the base.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.claims import Subject

PARALLEL = 0.9995


def merge(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    method: str = "linear",
    weight: tuple[float, float] = (0.4, 0.6),
    density: float = 0.5,
    t: float = 0.25,
    name: str = "layer",
    seed: int = 0,
) -> Tensor:
    """Merge one tensor in fp64 and round once; linear, ties and slerp as mergekit defines them."""
    o, x, y = (one.double() for one in (base, a, b))
    if method == "linear":
        return ((weight[0] * x + weight[1] * y) / (weight[0] + weight[1])).to(base.dtype)
    if method == "slerp":
        return slerp(x, y, t).to(base.dtype)
    deltas = [x - o, y - o]
    if method == "ties":
        deltas = [trimmed(d, density) for d in deltas]
    elif method == "dare_linear":
        deltas = [d * mask(d, density, f"{name}/{i}", seed) / density for i, d in enumerate(deltas)]
    terms = [w * d for w, d in zip(weight, deltas, strict=True)]
    if method != "ties":
        return (o + (terms[0] + terms[1])).to(base.dtype)
    sign = torch.where(terms[0] + terms[1] >= 0, 1.0, -1.0)
    agree = [term.sign() == sign for term in terms]
    total = torch.stack(
        [torch.where(k, term, 0.0) for k, term in zip(agree, terms, strict=True)]
    ).sum(0)
    divisor = torch.stack([k * w for k, w in zip(agree, weight, strict=True)]).sum(0)
    return (o + total / torch.where(divisor == 0, 1.0, divisor)).to(base.dtype)


def slerp(x: Tensor, y: Tensor, t: float) -> Tensor:
    """Interpolate on the sphere; linearly where the tensors are parallel."""
    cosine = ((x / x.norm()) * (y / y.norm())).sum().clamp(-1, 1)
    if float(cosine.abs()) > PARALLEL:
        return (1 - t) * x + t * y
    angle = torch.acos(cosine)
    return (torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)


def trimmed(delta: Tensor, density: float) -> Tensor:
    """Keep the largest magnitudes, the first of equal ones."""
    count = max(1, int(density * delta.numel()))
    order = delta.abs().flatten().argsort(descending=True, stable=True)
    kept = torch.zeros(delta.numel(), dtype=torch.bool)
    kept[order[:count]] = True
    return torch.where(kept.reshape(delta.shape), delta, 0.0)


def mask(delta: Tensor, density: float, name: str, seed: int) -> Tensor:
    """Draw a mask by the tensor's name: other tensors, and calls before, do not change it."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    make = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    return (torch.rand(delta.shape, generator=make, dtype=torch.float64) < density).double()


def given(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return a base and two models near it."""
    base, a, b = case.arguments.values()
    return base, base + a / 4, base + b / 4


def unit(case: Case) -> float:
    """Return the unit roundoff of the case's dtype."""
    return float(torch.finfo(case.dtype).eps) / 2


def close(tally: Tally, got: Tensor, wanted: Tensor, size: Tensor, u: float, where: str) -> None:
    """Require a sum of two terms within its roundings in any order; see comparing/derived/merged.py."""
    bound = 1.01 * (9 * u * size + 2 * u * wanted.abs()) + 1e-30
    tally.true((got.double() - wanted).abs() <= bound, where, got)


def sums_are_close(subject: Subject, case: Case, tally: Tally) -> None:
    """Linear and task arithmetic are the weighted sums, within their roundings."""
    base, a, b = given(case)
    o, x, y = (one.double() for one in (base, a, b))
    tally.count(case.rows)
    for w in ((0.4, 0.6), (1.0, 0.5), (0.3, 0.3)):
        got = subject(base, a, b, method="linear", weight=w)
        terms = [w[0] * x / sum(w), w[1] * y / sum(w)]
        size = terms[0].abs() + terms[1].abs()
        close(tally, got, terms[0] + terms[1], size, unit(case), f"linear by {w}")
        got = subject(base, a, b, method="task_arithmetic", weight=w)
        deltas = [w[0] * (x - o), w[1] * (y - o)]
        size = deltas[0].abs() + deltas[1].abs()
        close(tally, got, o + deltas[0] + deltas[1], size, unit(case), f"task arithmetic by {w}")


def ends(subject: Subject, case: Case, tally: Tally) -> None:
    """A weight of one and zero, and t = 0 and 1, give a model's bits; no weight at all gives the base's."""
    base, a, b = given(case)
    tally.count(case.rows)
    tally.same(subject(base, a, b, method="linear", weight=(1.0, 0.0)), a, "linear, all of a")
    tally.same(subject(base, a, b, method="linear", weight=(0.0, 1.0)), b, "linear, all of b")
    tally.same(subject(base, a, b, method="slerp", t=0.0), a, "slerp at 0")
    tally.same(subject(base, a, b, method="slerp", t=1.0), b, "slerp at 1")
    for method in ("task_arithmetic", "ties", "dare_linear"):
        none = subject(base, a, b, method=method, weight=(0.0, 0.0))
        tally.same(none, base, f"{method} without weights")


def slerp_keeps_norms(subject: Subject, case: Case, tally: Tally) -> None:
    """SLERP of two tensors of one norm has that norm, and divides the angle."""
    _, a, b = case.arguments.values()
    x, y = (v / v.double().norm().to(v.dtype) for v in (a, b))
    tally.count(case.rows)
    p, q = x.double(), y.double()
    cosine = float(((p / p.norm()) * (q / q.norm())).sum())
    if abs(cosine) > 0.99 or math.isnan(cosine):
        tally.compared += 1
        return
    angle = torch.acos(torch.tensor(cosine).double())
    for t in (0.25, 0.5):
        got = subject(torch.zeros_like(x), x, y, method="slerp", t=t).double()
        norm = abs(float(got.norm()) - float(p.norm())) / float(p.norm())
        # Both inputs have that norm up to their rounding; each element of the result is rounded once.
        tally.within(
            norm, 4 * unit(case) + 2.0**-18 + abs(float(q.norm() / p.norm()) - 1), 1, f"norm at {t}"
        )
        along = torch.acos(((p / p.norm()) * (got / got.norm())).sum().clamp(-1, 1))
        tally.within(abs(float(along - t * angle)), 16 * unit(case) + 2.0**-9, 1, f"angle at {t}")


def ties_elects(subject: Subject, case: Case, tally: Tally) -> None:
    """TIES keeps the largest of each model, elects a sign, and averages those that agree."""
    base, a, b = given(case)
    tally.count(case.rows)
    o = base.double()
    # Differences in the tool's dtype are one operation each: they have one result.
    deltas = [(one - base).double() for one in (a, b)]
    for w in ((0.4, 0.6), (0.7, 0.3)):
        got = subject(base, a, b, method="ties", weight=w, density=0.5).double()
        count = max(1, int(0.5 * base.numel()))
        least = [d.abs().flatten().topk(count).values[-1] for d in deltas]
        sure = torch.ones(base.shape, dtype=torch.bool)
        for d, edge in zip(deltas, least, strict=True):
            unique = int((d.abs() >= edge).sum()) == count
            sure &= (d.abs() != edge) | unique
        kept = [
            torch.where(d.abs() >= e, w_ * d, 0.0)
            for d, e, w_ in zip(deltas, least, w, strict=True)
        ]
        total, size = kept[0] + kept[1], kept[0].abs() + kept[1].abs()
        sure &= (total.abs() > 8 * unit(case) * size) | (size == 0)
        sign = torch.where(total >= 0, 1.0, -1.0)
        agree = [k.sign() == sign for k in kept]
        chosen = [torch.where(g, k, 0.0) for g, k in zip(agree, kept, strict=True)]
        divisor = sum(torch.where(g, v, 0.0) for g, v in zip(agree, w, strict=True))
        assert isinstance(divisor, Tensor)
        mean = (chosen[0] + chosen[1]) / torch.where(divisor == 0, 1.0, divisor)
        bound = 1.01 * (9 * unit(case) * mean.abs() + 2 * unit(case) * (o + mean).abs()) + 1e-30
        tally.true(((got - o - mean).abs() <= bound) | ~sure, f"ties by {w}", got)


def dare_masks(subject: Subject, case: Case, tally: Tally) -> None:
    """DARE drops by the tensor's name, multiplies by 1 / density, and keeps about the stated share."""
    base, a, _ = given(case)
    zero, delta = torch.zeros_like(base), a - base
    delta = torch.where(delta == 0, torch.ones_like(delta), delta)
    tally.count(case.rows)

    def drop(name: str) -> Tensor:
        return subject(
            zero, delta, zero, method="dare_linear", weight=(1.0, 0.0), density=0.5, name=name
        )

    first = drop("one")
    drop("another")
    tally.same(drop("one"), first, "after another tensor")
    wanted = torch.where(first == 0, torch.zeros_like(first), 2 * delta)
    close(tally, first, wanted.double(), wanted.double().abs(), unit(case), "kept or dropped")
    share, n = float((first != 0).double().mean()), delta.numel()
    tally.within(abs(share - 0.5), 8 * (0.25 / n) ** 0.5, 1, "share that is kept")


def free_of_order(subject: Subject, case: Case, tally: Tally) -> None:
    """Threads, and the order of models where the method is symmetric, change no bit."""
    base, a, b = given(case)
    tally.count(case.rows)
    for method in ("linear", "slerp", "task_arithmetic", "ties", "dare_linear"):
        with thread_count(1):
            one = subject(base, a, b, method=method)
        with thread_count(2):
            tally.same(subject(base, a, b, method=method), one, f"{method} on two threads")
    for method in ("linear", "task_arithmetic", "ties"):
        one = subject(base, a, b, method=method, weight=(0.4, 0.6))
        other = subject(base, b, a, method=method, weight=(0.6, 0.4))
        tally.same(other, one, f"{method} with models swapped")


# ---- planted: the reference with one mistake


def lerp_for_slerp(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Interpolate linearly."""
    if method != "slerp":
        return merge(base, a, b, method, **more)
    t = more.get("t", 0.25)
    return merge(base, a, b, "linear", weight=(1 - t, t))


def not_normalised(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Leave the division by the weights out."""
    if method != "linear":
        return merge(base, a, b, method, **more)
    w: tuple[float, float] = more.get("weight", (0.4, 0.6))
    return (w[0] * a.double() + w[1] * b.double()).to(base.dtype)


def sums_in_bf16(base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any) -> Tensor:
    """Work in eight bits less than the models."""
    low = torch.bfloat16 if base.dtype == torch.float32 else torch.float8_e4m3fn
    return merge(base.to(low).float(), a.to(low).float(), b.to(low).float(), method, **more).to(
        base.dtype
    )


def weights_swapped(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Give each model the weight of the other."""
    w = more.pop("weight", (0.4, 0.6))
    return merge(base, a, b, method, weight=(w[1], w[0]), **more)


def from_the_other_end(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Interpolate from b to a."""
    return merge(base, a, b, method, **{**more, "t": 1 - more.get("t", 0.25)})


def to_the_unit_sphere(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Shorten the result of SLERP by the cosine of half an angle."""
    found = merge(base, a, b, method, **more)
    return found * 0.96875 if method == "slerp" and 0 < more.get("t", 0.25) < 1 else found


def forgets_the_base(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Add differences to zero."""
    found = merge(base, a, b, method, **more)
    return found if method in ("linear", "slerp") else found - base


def elects_the_other_sign(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Elect the sign of the smaller sum."""
    if method != "ties":
        return merge(base, a, b, method, **more)
    w = more.get("weight", (0.4, 0.6))
    terms = [
        v * trimmed(one.double() - base.double(), more.get("density", 0.5))
        for v, one in zip(w, (a, b), strict=True)
    ]
    sign = -torch.where(terms[0] + terms[1] >= 0, 1.0, -1.0)
    parts = [torch.where(t.sign() == sign, t / v, 0.0) for t, v in zip(terms, w, strict=True)]
    total = parts[0] + parts[1]
    return (base.double() + total).to(base.dtype)


def trims_one_more(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Keep one fewer than the density says."""
    count = int(more.get("density", 0.5) * base.numel())
    return merge(base, a, b, method, **{**more, "density": (count - 0.5) / base.numel()})


def trims_nothing(
    base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any
) -> Tensor:
    """Ignore the density."""
    return merge(base, a, b, method, **{**more, **({"density": 1.0} if method == "ties" else {})})


CALLS = [0]


def mask_by_call(base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any) -> Tensor:
    """Draw masks one after the other, as a shared random generator does."""
    CALLS[0] += 1
    return merge(base, a, b, method, **{**more, "name": str(CALLS[0])})


def not_rescaled(base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any) -> Tensor:
    """Leave the factor of DARE out."""
    w = more.pop("weight", (0.4, 0.6))
    by = more.get("density", 0.5) if method == "dare_linear" else 1.0
    return merge(base, a, b, method, weight=(w[0] * by, w[1] * by), **more)


def by_threads(base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any) -> Tensor:
    """Multiply by one and a bit on two threads."""
    return merge(base, a, b, method, **more) * (1 + 0.0078125 * (torch.get_num_threads() - 1))


# ---- stock control


def mergekit(base: Tensor, a: Tensor, b: Tensor, method: str = "linear", **more: Any) -> Tensor:
    """Merge DARE as mergekit 0.1.5 does: masks of one generator, a factor of sums in the dtype of the models."""
    if method != "dare_linear":
        return merge(base, a, b, method, **more)
    density, weights = more.get("density", 0.5), more.get("weight", (0.4, 0.6))
    found = torch.zeros_like(base)
    for one, weight in zip((a, b), weights, strict=True):
        delta = one - base
        kept = torch.bernoulli(torch.full_like(delta, density)) * delta
        before, after = delta.abs().sum(), kept.abs().sum()
        found += weight * (kept * (before / after) if float(after) else kept)
    return base + found
