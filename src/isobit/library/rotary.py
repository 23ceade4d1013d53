"""Claims of rope-kernel-v1: rotation and its gradient, independent heads, fp32 angles; planted wrong rotations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import stock
from isobit.library.certificates import U
from isobit.library.claims import Subject, gradients
from isobit.ops.portable.sums import round_once
from isobit.ops.rotary import portable
from isobit.ops.rotary.op import rotary


def portable_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the portable executor's result."""
    return portable.rotary(x, cos, sin)


def angles_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions in fp32, equal in both halves; the drawn arguments are not angles."""
    tokens, d = case.arguments["cos"].shape
    rates = 10000.0 ** (-torch.arange(0, d, 2) / d)
    first = case.recipe.seed % 1000
    turned = torch.arange(first, first + tokens).unsqueeze(1) * torch.cat([rates, rates])
    return turned.cos(), turned.sin()


def keeps_heads_apart(subject: Subject, case: Case, tally: Tally) -> None:
    """A head by itself, and heads in another order, have the same bits."""
    x, cos, sin = case.arguments.values()
    whole = subject(x, cos, sin)
    for head in range(x.shape[1]):
        one = slice(head, head + 1)
        tally.same(subject(x[:, one], cos, sin), whole[:, one], f"head {head} by itself")
    tally.same(subject(x.flip(1), cos, sin), whole.flip(1), "heads reversed")
    tally.count(case.rows)


def decodes_as_prefilled(subject: Subject, case: Case, tally: Tally) -> None:
    """Angles shared by a batch, and a token alone, give the bits of the whole."""
    x, (cos, sin) = case.arguments["x"], angles_of(case)
    whole = subject(x, cos, sin)
    twice = subject(torch.stack([x, x.flip(-1)]), cos, sin)
    tally.same(twice[0], whole, "in a batch of two that shares its angles")
    for t in {0, len(x) // 2, len(x) - 1} if len(x) else ():
        tally.same(subject(x[t : t + 1], cos[t], sin[t]), whole[t : t + 1], f"token {t} alone")
    tally.count(case.rows)


def turns_back(subject: Subject, case: Case, tally: Tally) -> None:
    """The gradient is the rotation by the opposite angle, to the bit."""
    x, (cos, sin) = case.arguments["x"], angles_of(case)
    (found,) = gradients(subject, [x], x, cos=cos, sin=sin)
    tally.same(found, subject(x, cos, -sin), "the gradient")
    tally.count(case.rows)


def keeps_lengths(subject: Subject, case: Case, tally: Tally) -> None:
    """A rotation keeps the length of a pair, and the angle 0 changes nothing."""
    x, (cos, sin) = case.arguments["x"], angles_of(case)
    low, high = subject(x, cos, sin).double().chunk(2, -1)
    before = torch.hypot(*x.double().chunk(2, -1))
    tally.true((torch.hypot(low, high) - before).abs() <= 2.0**-20 * before, "a pair's length", low)
    tally.true(subject(x, torch.ones_like(cos), torch.zeros_like(sin)) == x, "a turn by 0", x)
    tally.count(case.rows)


def exact_angles(case: Case, first: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of consecutive positions, computed in fp64 and rounded to fp32 once."""
    tokens, d = case.arguments["cos"].shape
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turned = torch.arange(first, first + tokens).unsqueeze(1) * torch.cat([rates, rates])
    return turned.cos().float(), turned.sin().float()


def depends_on_the_distance(subject: Subject, case: Case, tally: Tally) -> None:
    """The product of a query and a key is the same at positions (m, n) and (m + s, n + s), within 16 roundings."""
    x = case.arguments["x"]
    q, k = x[:, :1], x[:, 1:]
    first = case.recipe.seed % 100
    size = (q.double().abs().square().sum(-1) * k.double().abs().square().sum(-1)).sqrt()
    products = []
    for shift in (0, 1, 911):
        near, far = exact_angles(case, first + shift), exact_angles(case, first + 7 + shift)
        turned = subject(q, *near).double() * subject(k, *far).double()
        products.append(turned.sum(-1))
    tally.count(case.rows)
    for shift, found in zip((1, 911), products[1:], strict=True):
        kept = (found - products[0]).abs() <= 16 * U * size
        tally.true(kept, f"q · k after a shift by {shift}", found)


def has_its_own_frequency(subject: Subject, case: Case, tally: Tally) -> None:
    """A unit vector is turned by the frequency of its own pair: cosine and sine in two places, zero elsewhere."""
    cos, sin = exact_angles(case, case.recipe.seed % 1000)
    tokens, d = cos.shape
    tally.count(case.rows)
    for low in {0, 1, d // 4, d // 2 - 1}:
        high = low + d // 2
        for at, (first, second) in {low: (cos, sin), high: (-sin, cos)}.items():
            unit, expected = torch.zeros(2, tokens, 1, d)
            unit[..., at] = 1
            expected[..., low], expected[..., high] = first[:, None, low], second[:, None, low]
            found = subject(unit, cos, sin)
            tally.true(found == expected, f"the unit vector {at}", found)


def takes_angles_in_fp32(subject: Subject, case: Case, tally: Tally) -> None:
    """An x of 16 bits is widened, rotated by fp32 angles, and rounded once."""
    x, (cos, sin) = case.arguments["x"], angles_of(case)
    wide = subject(x.float(), cos, sin)
    tally.same(subject(x, cos, sin), round_once(wide, x.dtype), "angles in fp32")
    tally.count(case.rows)


# ---- planted --------------------------------------------------------------------------------------------


def halves_apart(x: Tensor) -> Tensor:
    """Return -1 for the first half of a head, +1 for the second."""
    return torch.cat([-torch.ones(x.shape[-1] // 2), torch.ones(x.shape[-1] // 2)]).to(x.dtype)


def wrong_in_one_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Give the first half the other sign."""
    return stock.rotary(x, cos, sin * halves_apart(sin))


def of_the_neighbour(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Use the cosine of the previous position."""
    return rotary(x, cos.roll(1, -2), sin) if cos.dim() > 1 else rotary(x, cos, sin)


def in_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring elements together, as other models do."""
    y = rotary(torch.cat([x[..., ::2], x[..., 1::2]], -1), cos, sin)
    return torch.stack(y.chunk(2, -1), -1).flatten(-2)


def frequencies_reversed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Give the first pair the last frequency."""
    turned = [torch.cat([h.flip(-1) for h in t.chunk(2, -1)], -1) for t in (cos, sin)]
    return rotary(x, *turned)


def in_bf16(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Round the angles to bf16, as autocast does."""
    return rotary(x, cos.bfloat16().float(), sin.bfloat16().float())


def fused_if_alone(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate a single head or token with products that are not rounded."""
    alone = x.shape[-2] == 1 or x.shape[0] == 1
    wide = (t.double() for t in (x, cos, sin))
    return stock.rotary(*wide).to(x.dtype) if alone else rotary(x, cos, sin)


def last_head_off(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Change the last of several heads by a unit of bf16."""
    y = rotary(x, cos, sin)
    y[..., 1:, :][..., -1:, :] *= 1.0078125
    return y


def with_the_gradient_of_the_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the gradient forward instead of back."""
    forward = rotary(x.detach(), cos, sin)
    other = rotary(x, cos, -sin)
    return other + (forward - other).detach()


def rounded_between(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Round each product to x's dtype, as torch does."""
    low, high = x.chunk(2, -1)
    kept, crossed = x * cos.unsqueeze(-2), torch.cat([-high, low], -1) * sin.unsqueeze(-2)
    return kept.to(x.dtype) + crossed.to(x.dtype)


def narrow_for_narrow(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Round the angles to x's dtype first."""
    return rotary(x, cos.to(x.dtype), sin.to(x.dtype))
