"""What SiLU's, GELU's and SwiGLU's contracts claim beyond the library: references, refusals, planted functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.relations import same_class, unit_size
from isobit.contracts.judge.tally import Tally
from isobit.ops.gelu import portable as gelu_portable
from isobit.ops.gelu.op import gelu
from isobit.ops.silu import portable as silu_portable
from isobit.ops.silu.op import silu
from isobit.ops.swiglu import portable as swiglu_portable
from isobit.ops.swiglu.op import swiglu

Subject = Callable[..., Tensor]
Calls = Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]

U = 2.0**-24
LOST = 2.0**-119  # exponentials below 2^-126 are 0, and |x| is below 128 there

# ---- stock's, the exact ones, and the other executor's ---------------------------------------------------


def stock_silu(x: Tensor) -> Tensor:
    """torch's own."""
    return F.silu(x)


def stock_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """torch's own: 1 + erf, which cancels where x is negative."""
    return F.gelu(x, approximate=approximate)


def exact_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """The same functions by formulas that cancel nothing; in fp64 a reference."""
    if approximate == "tanh":
        return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return x * 0.5 * torch.special.erfc(-x / 2**0.5)  # type: ignore[no-any-return]


def stock_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As models write it: in 16 bits, silu is rounded before the product."""
    return F.silu(gate) * up


def portable_silu(x: Tensor) -> Tensor:
    """The other executor."""
    return silu_portable.silu(x)


def portable_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """The other executor."""
    return gelu_portable.gelu(x, approximate == "tanh")


def portable_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The other executor."""
    return swiglu_portable.swiglu(gate, up)


# ---- predicates -----------------------------------------------------------------------------------------


def stands_anywhere(subject: Subject, case: Case, tally: Tally) -> None:
    """Each element of a flat run has its bits at every lane, in rows of seven, three apart, and alone."""
    given = [t.reshape(-1) for t in case.arguments.values()]
    whole = subject(*given, **case.options)
    for k in (1, 5, 8, 15):
        tally.same(
            subject(*(t[k:] for t in given), **case.options), whole[k:], f"from element {k} on"
        )
    sevens = len(whole) // 7
    rows = subject(*(in_rows(t[: 7 * sevens]) for t in given), **case.options)
    tally.same(rows.reshape(-1), whole[: 7 * sevens], "in rows of seven")
    apart = subject(*(t.unsqueeze(1).repeat(1, 3)[:, 1] for t in given), **case.options)
    tally.same(apart, whole, "three apart")
    for at in {0, len(whole) // 2, len(whole) - 1} if len(whole) else ():
        alone = subject(*(t[at : at + 1].clone() for t in given), **case.options)
        tally.same(alone, whole[at : at + 1], f"element {at} alone")
    tally.count(case.rows)


def in_rows(flat: Tensor) -> Tensor:
    """[n / 7, 7] with a gap after each row."""
    room = flat.new_zeros(len(flat) // 7, 9)
    room[:, :7] = flat.view(-1, 7)
    return room[:, :7]


def reflects(subject: Subject, case: Case, tally: Tally) -> None:
    """f(x) - f(-x) = x, within sixteen roundings of fp32."""
    x = case.arguments["x"]
    found = subject(x, **case.options).double() - subject(-x, **case.options).double()
    tally.count(case.rows)
    tally.true(
        (found - x.double()).abs() <= 16 * U * x.double().abs() + LOST,
        "f(x) − f(−x) is not x",
        found,
    )


def rounds_once(
    exact: Subject, roundings: Callable[[Case], int]
) -> Callable[[Subject, Case, Tally], None]:
    """Half a unit in the last place, and so many roundings of fp32 before; what underflows may be 0."""

    def holds(subject: Subject, case: Case, tally: Tally) -> None:
        found = subject(*case.arguments.values(), **case.options)
        true = exact(*(t.double() for t in case.arguments.values()), **case.options)
        rounded = true.to(found.dtype)
        lost = LOST * case.arguments["up"].double().abs() if "up" in case.arguments else LOST
        allowed = unit_size(rounded, true, "ulp") / 2 + roundings(case) * U * true.abs() + lost
        close = (found.double() - true).abs() <= allowed
        tally.count(case.rows)
        tally.true(close | same_class(found, rounded), "not rounded once", found)

    return holds


# exp is within two roundings, 1 + e and the division cost one each.
silu_rounds_once = rounds_once(stock_silu, lambda case: 4)
swiglu_rounds_once = rounds_once(stock_swiglu, lambda case: 5)
# An exponent up to 87 carries one rounding (x²) or five (x (k + k' x²)); the polynomial cancels 1.4 of 2: fifty more.
gelu_rounds_once = rounds_once(
    exact_gelu, lambda case: 440 if case.options.get("approximate") == "tanh" else 140
)


# ---- refusals -------------------------------------------------------------------------------------------


def refused_of_one() -> Calls:
    """Calls that no kernel of one tensor takes."""
    x = torch.ones(2, 3)
    yield "integers", (x.int(),), {}
    yield "a sparse input", (x.to_sparse(),), {}
    yield "complex numbers", (x.to(torch.complex64),), {}
    yield "a list", ([1.0],), {}


def refused_gelu() -> Calls:
    """And an approximation without a name."""
    yield from refused_of_one()
    yield "another approximation", (torch.ones(2), "sigmoid"), {}
    yield "a truth for an approximation", (torch.ones(2), True), {}


def refused_swiglu() -> Calls:
    """Pairs that are not alike."""
    x = torch.ones(2, 3)
    yield "other shapes", (x, x[:1]), {}
    yield "other dtypes", (x, x.double()), {}
    yield "integers", (x.int(), x.int()), {}
    yield "a sparse input", (x, x.to_sparse()), {}


# ---- planted --------------------------------------------------------------------------------------------


def with_a_tail_of(function: Subject, other: Subject) -> Subject:
    """The elements that do not fill sixteen lanes of a row, by other code."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y, n = function(*given, **named), given[0].shape[-1]
        if n % 16:
            tail = [t[..., n // 16 * 16 :] if isinstance(t, Tensor) else t for t in given]
            y = torch.cat([y[..., : n // 16 * 16], other(*tail, **named)], -1)
        return y

    return wrong


def by_libm(x: Tensor) -> Tensor:
    """x times torch's sigmoid, in fp32."""
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)


def by_error_function(x: Tensor, approximate: str = "none") -> Tensor:
    """The exact formulas in fp32."""
    return exact_gelu(x.float(), approximate).to(x.dtype)


silu_with_other_tail = with_a_tail_of(silu, by_libm)
gelu_with_other_tail = with_a_tail_of(gelu, by_error_function)
swiglu_with_other_tail = with_a_tail_of(
    swiglu, lambda gate, up: (by_libm(gate.float()) * up.float()).to(up.dtype)
)


def silu_in_small_batches_by_stock(x: Tensor) -> Tensor:
    """Another kernel for few elements."""
    return F.silu(x) if x.numel() < 500 else silu(x)


def gelu_in_small_batches_by_stock(x: Tensor, approximate: str = "none") -> Tensor:
    """Another kernel for few elements."""
    return F.gelu(x, approximate=approximate) if x.numel() < 500 else gelu(x, approximate)


def swiglu_in_small_batches_by_libm(gate: Tensor, up: Tensor) -> Tensor:
    """Another kernel for few elements."""
    return (
        (by_libm(gate.float()) * up.float()).to(up.dtype)
        if gate.numel() < 500
        else swiglu(gate, up)
    )


def silu_rounded_between(x: Tensor) -> Tensor:
    """The logistic function is rounded to bf16."""
    return (x.float() * torch.sigmoid(x.float()).bfloat16().float()).to(x.dtype)


def gelu_rounded_between(x: Tensor, approximate: str = "none") -> Tensor:
    """The share is rounded to bf16."""
    share = exact_gelu(x.double(), approximate) / x.double()
    return (x.float() * share.nan_to_num(0.5, 1.0, 0.0).bfloat16().float()).to(x.dtype)


def swiglu_rounded_between(gate: Tensor, up: Tensor) -> Tensor:
    """silu is rounded to bf16 before the product."""
    return (silu(gate).bfloat16().float() * up.float()).to(up.dtype)


def silu_too_steep(x: Tensor) -> Tensor:
    """A slope of 1.702, as the sigmoid's GELU has."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def gelu_the_other(x: Tensor, approximate: str = "none") -> Tensor:
    """The approximation where the function is asked for, and the other way round."""
    return gelu(x, "none" if approximate == "tanh" else "tanh")


def gelu_by_difference(x: Tensor, approximate: str = "none") -> Tensor:
    """1 + erf in fp32, which is 0 where x is below -5.6, and coarse before."""
    return (0.5 * x.float() * (1 + torch.erf(x.float() / 2**0.5))).to(x.dtype)


def swiglu_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """The gate is taken for the other."""
    return swiglu(up, gate)


def by_lane(function: Subject) -> Subject:
    """Every sixteenth element of a call is off by a unit of bf16."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y = function(*given, **named).clone()
        y.view(-1)[3::16] *= 1.0078125
        return y

    return wrong


silu_off_by_lane, gelu_off_by_lane, swiglu_off_by_lane = (
    by_lane(silu),
    by_lane(gelu),
    by_lane(swiglu),
)
