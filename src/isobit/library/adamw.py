"""Claims of adamw-kernel-v1: the step has the bits of its definition, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.ops.adamw import portable
from isobit.ops.portable.sums import round_once
from isobit.optim import AdamW

Step = Callable[..., Tensor]
RATE, DECAY, EPS, BETAS, COUNT = 1e-3, 0.1, 1e-8, (0.9, 0.999), 3
OPTIONS: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY, "eps": EPS, "betas": BETAS}


def stepped(p: Tensor, grad: Tensor, first: Tensor, second: Tensor, **form: Any) -> Tensor:
    """Return the third step of isobit.optim.AdamW from given moments: parameter and moments side by side."""
    return step_with(AdamW, p, grad, first, second, **form)


def fused(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the step of torch's fused form, whose tails have other bits."""
    return step_with(torch.optim.AdamW, p, grad, first, second, fused=True)


def step_with(
    kind: type[torch.optim.AdamW],
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    count: int = COUNT,
    **form: Any,
) -> Tensor:
    """Return one step of an optimiser with the given state; its tensors have the strides of the given ones."""
    parameter = torch.nn.Parameter(stored_like(p, p))
    parameter.grad = stored_like(grad, grad)
    optimiser = kind([parameter], **OPTIONS, **form)
    moments = {
        "exp_avg": stored_like(first, first),
        "exp_avg_sq": stored_like(second, second.abs()),
    }
    optimiser.state[parameter] = {"step": torch.tensor(float(count - 1)), **moments}
    with torch.enable_grad():
        optimiser.step()
    return torch.cat([parameter.detach(), *moments.values()], -1)


def stored_like(place: Tensor, values: Tensor) -> Tensor:
    """Return a copy with the strides and the offset of `place`, because the step writes in place."""
    axes = zip(place.shape, place.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in axes)
    room = torch.zeros(place.storage_offset() + max(span, 1), dtype=place.dtype)
    return room.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(values)


def cut_anywhere(subject: Step, case: Case, tally: Tally) -> None:
    """The step of a parameter is that of its pieces, cut anywhere, as flat shards are."""
    flat = [t.flatten() for t in case.arguments.values()]
    size = flat[0].numel()
    tally.count(case.rows)
    whole = subject(*flat).reshape(3, size)
    drawn = torch.randint(0, size + 1, (5,), generator=case.generator(41)).tolist()
    places = [0, *sorted({min(1, size), min(8, size), *drawn}), size]
    parts = [subject(*(t[a:b] for t in flat)).reshape(3, b - a) for a, b in pairwise(places)]
    tally.same(torch.cat(parts, 1), whole, f"cut at {places[1:-1]}")


def is_defined(subject: Step, case: Case, tally: Tally) -> None:
    """The step has the bits of the definition in ops/adamw/portable.py."""
    tally.count(case.rows)
    p, grad, first, second = case.arguments.values()
    numbers = portable.numbers_of(RATE, BETAS, EPS, DECAY, COUNT)
    expected = torch.cat(portable.adamw(p, grad, first, second.abs(), numbers), -1)
    tally.same(subject(p, grad, first, second), expected, "against the definition")


def is_adamw(subject: Step, case: Case, tally: Tally) -> None:
    """A step is within the roundings of the formula in fp64, also for gradients small enough that eps matters."""
    tally.count(case.rows)
    scales = (2.0**-12, 2.0**-12, 2.0**-12, 2.0**-24)
    given = tuple(case.arguments.values())
    for arguments in (given, tuple(t * scale for t, scale in zip(given, scales, strict=True))):
        compare_with_formula(subject, arguments, tally)


def compare_with_formula(subject: Step, given: tuple[Tensor, ...], tally: Tally) -> None:
    """Compare one step; constants are rounded too."""
    p, grad, first, second = (t.double() for t in given)
    kind = torch.finfo(given[0].dtype)
    unit, least = kind.eps / 2, kind.smallest_normal * kind.eps
    exact, size = formula(p, grad, first, second.abs())
    sums = first.abs() + grad.abs()
    # The roundings are counted in library/adamw.contract.yaml.
    limits = (4 * p.abs() + 14 * size * sums, 4 * sums, 5 * exact[2])
    parts, names = subject(*given).double().chunk(3, -1), ("parameter", "mean", "square")
    for name, found, true, limit in zip(names, parts, exact, limits, strict=True):
        tally.true((found - true).abs() <= unit * limit + least, f"the {name} against fp64", found)


def formula(
    p: Tensor, grad: Tensor, first: Tensor, second: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the step in the given dtype, and what a unit of the mean adds to the update."""
    mean = first + (1 - BETAS[0]) * (grad - first)
    square = BETAS[1] * second + (1 - BETAS[1]) * grad * grad
    spread = square.sqrt() / math.sqrt(1 - BETAS[1] ** COUNT) + EPS
    size = RATE / (1 - BETAS[0] ** COUNT) / spread
    return (p * (1 - RATE * DECAY) - size * mean, mean, square), size


# Wrong steps of AdamW, planted into adamw-kernel-v1.

NUMBERS = portable.numbers_of(RATE, BETAS, EPS, DECAY, COUNT)


def joined(like: Tensor, *results: Tensor) -> Tensor:
    """Return results side by side, each rounded once."""
    return torch.cat([round_once(result, like.dtype) for result in results], -1)


def moments(grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new mean and mean of squares in fp32, as the definition has them."""
    g, n = grad.float(), NUMBERS
    mean = first.float() * n.keep_mean + g * n.add_mean
    return mean, second.float().abs() * n.keep_square + (g * n.add_square) * g


def moved(p: Tensor, mean: Tensor, divisor: Tensor) -> Tensor:
    """Return the new parameter, as the definition has it."""
    return p.float() * NUMBERS.decay - (mean * NUMBERS.rate) / divisor


def fused_products(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Fuse products with sums, as a compiler does that may contract."""
    n, g, wide = NUMBERS, grad.float(), grad.double()
    keep, added = (float(torch.tensor(x)) for x in (n.keep_mean, n.add_mean))
    mean = (first.double() * keep + (wide * added).float().double()).float()
    scale = float(torch.tensor(n.keep_square))
    square = (second.double().abs() * scale + ((g * n.add_square) * g).double()).float()
    divisor = portable.exact_root(square) * n.spread + n.eps
    return joined(p, moved(p, mean, divisor), mean, square)


def approximate_root(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Take the square root by a reciprocal one, as a GPU's fast mode does."""
    mean, square = moments(grad, first, second)
    root = torch.where(square > 0, square * square.rsqrt(), square)
    return joined(p, moved(p, mean, root * NUMBERS.spread + EPS), mean, square)


def corrected_inside(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Correct the bias of the squares before the root, not after it."""
    mean, square = moments(grad, first, second)
    divisor = portable.exact_root(square / (1 - BETAS[1] ** COUNT)) + EPS
    return joined(p, moved(p, mean, divisor), mean, square)


def divided_first(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide the mean before it is multiplied by the rate."""
    mean, square = moments(grad, first, second)
    divisor = portable.exact_root(square) * NUMBERS.spread + EPS
    value = p.float() * NUMBERS.decay - (mean / divisor) * NUMBERS.rate
    return joined(p, value, mean, square)


def rounded_between(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Round the moments to their 16 bits before the parameter is computed from them."""
    mean, square = (t.to(p.dtype).float() for t in moments(grad, first, second))
    divisor = portable.exact_root(square) * NUMBERS.spread + EPS
    return joined(p, moved(p, mean, divisor), mean, square)


def corrected_late(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Correct the bias by the count before this step."""
    return step_with(AdamW, p, grad, first, second, COUNT - 1)


def eps_inside(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide by sqrt(v + eps) instead of sqrt(v) + eps."""
    (_, mean, square), _ = formula(p.float(), grad.float(), first.float(), second.float().abs())
    spread = (square / (1 - BETAS[1] ** COUNT) + EPS).sqrt()
    moved = p.float() * (1 - RATE * DECAY) - RATE / (1 - BETAS[0] ** COUNT) * mean / spread
    return torch.cat([moved, mean, square], -1).to(p.dtype)


def coupled(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Add the decay to the gradient, as Adam with L2 does."""
    wide, added = p.float(), grad.float() + DECAY * p.float()
    (moved, *moments), _ = formula(wide, added, first.float(), second.float().abs())
    return torch.cat([moved + RATE * DECAY * wide, *moments], -1).to(p.dtype)


def normalised_apart(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Divide each piece's gradient by its own largest element."""
    largest = grad.detach().nan_to_num(0, 0, 0).abs().amax() if grad.numel() else 1.0
    return stepped(p, grad / (largest + 1.0), first, second)


def by_tails(p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Compute the last elements, fewer than a vector, by another formula."""
    whole = stepped(p, grad, first, second)
    tail = whole.shape[-1] // 3 % 8
    whole[..., whole.shape[-1] // 3 - tail : whole.shape[-1] // 3] *= 1 + torch.finfo(p.dtype).eps
    return whole
