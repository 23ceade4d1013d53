"""Proofs about softmax: order by certificate, error and sum by intervals, range by Bitwuzla, exp by enumeration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import draw_values
from isobit.contracts.judge.transforms import THREADS
from isobit.library.linear.orders import with_threads
from isobit.library.softmax.claims import portable_softmax
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.order.addition import digest
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.tree import merge
from isobit.records import Proof
from isobit.reveal import targets
from isobit.reveal.certificate import certify
from isobit.reveal.targets.tensor_target import TensorTarget

Subject = Callable[..., Tensor]

WIDTHS, ROWS = (64, 300, 1024), (1, 5, 33)
BOUNDED = (1, 16, 64, 1024, 4096, 32000, 131072, 151936)
EXP_ERROR = 1.0  # ulp; tests/ops/test_softmax.py tries every fp32 argument
U = 2.0**-24
# As the contract states them: (width, limit).
SUM_LIMIT, ERROR_LIMIT = (1024, 2e-6), (64, 1.2e-5)


def prove_order(subject: Subject) -> Proof:
    """The denominator's order is the defined one at every row count; and the bits are the portable definition's."""
    count = 0
    for width in WIDTHS:

        def target(m: int, threads: int, width: int = width) -> TensorTarget:
            return with_threads(targets.softmax(width, m, function=subject), threads)

        found = certify(target, [{"m": m, "threads": t} for m in ROWS for t in THREADS])
        count += found.count
        if not found.matches(digest(expected_tree(FeaturePlan(width).segments, "striped"))):
            return Proof("order certificate", "", count, f"rows of {width}: {found}")
        x = draw_values((257, width), "logits", torch.Generator().manual_seed(width))
        difference = bits.first_difference(subject(x, -1), portable_softmax(x))
        if difference is not None:
            return Proof(
                "order certificate",
                "",
                count,
                f"rows of {width} against the definition: {difference}",
            )
    covers = (
        f"fp32 rows of {list(WIDTHS)}, {list(ROWS)} of them, {list(THREADS)} threads: the denominator is summed in the "
        "defined order (shown by probing), everything else is elementwise"
    )
    return Proof("order certificate", covers, count)


def bounds_of(width: int) -> tuple[float, float]:
    """(|Σy − 1|, relative error of y), from above, for rows whose results do not underflow."""
    arb = load_arb()
    u, exp = arb(U), arb(EXP_ERROR) * 2 * arb(U)
    grown = (1 + u) ** depth_of(expected_tree(FeaturePlan(width).segments, "striped"))
    # Terms are positive, so the computed sum is the sum of terms each off by at most the depth's roundings.
    total = (1 + u) / (2 - grown) - 1
    # A difference x − max rounded to fp32 moves its exponential by u·|x − max|, at most 88·u where it counts.
    error = (1 + u) * (1 + exp) * (1 + 88 * u) / ((1 - exp) * (1 - 88 * u) * (2 - grown)) - 1
    return float(total.abs_upper()), float(error.abs_upper())


def prove_sum(subject: Subject) -> Proof:
    """Σy is 1 within the bound of the order."""
    return _prove_bound(subject, 0, SUM_LIMIT, "|Σy − 1|")


def prove_error(subject: Subject) -> Proof:
    """The relative error against exact arithmetic is within the bound."""
    return _prove_bound(subject, 1, ERROR_LIMIT, "the relative error of y")


def _prove_bound(subject: Subject, which: int, stated: tuple[int, float], what: str) -> Proof:
    width, limit = stated
    order = prove_order(subject)
    if not order.kept:
        return Proof("interval bounds", "", order.cases, order.failure)
    worst = {n: bounds_of(n)[which] for n in BOUNDED}
    if not 0 < worst[width] <= limit:
        return Proof(
            "interval bounds",
            "",
            len(BOUNDED),
            f"{what} at {width}: {worst[width]:.3g}, limit {limit:.3g}",
        )
    said = ", ".join(f"{bound:.2g} at {n}" for n, bound in worst.items())
    covers = f"all fp32 rows whose results do not underflow: {what} is at most {said}"
    return Proof("interval bounds over the certified order", covers, len(BOUNDED) + order.cases)


def prove_range(subject: Subject) -> Proof:
    """0 ≤ y ≤ 1 in IEEE arithmetic, whatever the exponentials are, if they are in [0, 1] and the largest is 1."""
    cases = 0
    for width in (2, 3, 8):
        x = draw_values((4096, width), "logits", torch.Generator().manual_seed(width))
        if not bits.equal(subject(x, -1), by_model(x)):
            return Proof(
                "Bitwuzla",
                "",
                cases + 1,
                f"the model of rows of {width} is not what the kernel does",
            )
        for i in range(width):
            cases += 1
            if not smt.is_unsatisfiable(range_formula(width, i)):
                return Proof("Bitwuzla", "", cases, f"outside [0, 1] at place {i} of {width}")
    covers = "all fp32 rows of 2, 3 and 8; exp abstracted by its range; the model agrees with the kernel on 12,288 rows"
    return Proof("Bitwuzla on the IEEE model", covers, cases)


def by_model(x: Tensor) -> Tensor:
    """What the formula says, carried out: each term a lane, lanes merged by the tree, one division."""
    terms = exp_nonpositive(x - x.amax(-1, keepdim=True))
    lanes = list(terms.unbind(-1)) + [torch.zeros(len(x))] * (16 - x.shape[-1])
    return terms / merge(lanes, torch.add).unsqueeze(-1)


def range_formula(width: int, place: int) -> str:
    """Satisfiable if some y leaves [0, 1]."""
    names = [f"e{i}" for i in range(width)]
    zero, one = smt.number(0.0), smt.number(1.0)
    text = smt.declare(names)
    text += "".join(f"(assert (and (fp.leq {zero} {n}) (fp.leq {n} {one})))\n" for n in names)
    text += f"(assert (or {' '.join(f'(fp.eq {n} {one})' for n in names)}))\n"
    total = merge([*names, *[zero] * (16 - width)], smt.add)
    text += f"(define-fun y () F (fp.div RNE e{place} {total}))\n"
    return text + f"(assert (not (and (fp.leq {zero} y) (fp.leq y {one}))))\n"


def every_difference(dtype: torch.dtype) -> Tensor:
    """Every finite value of a 16-bit dtype that is not positive, ascending, as fp32."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.unique(values[values.isfinite() & (values <= 0)].float())  # type: ignore[no-any-return]


def prove_monotone(subject: Subject) -> Proof:
    """One row that holds every difference: a larger one has no smaller result."""
    cases = 0
    for dtype in (torch.bfloat16, torch.float16):
        row = every_difference(dtype)
        found = subject(row.unsqueeze(0), -1)[0]
        cases += len(row)
        wrong = (found[1:] < found[:-1]).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return Proof(
                "enumeration of the real kernel",
                "",
                cases,
                f"falls from {row[at]!r} to {row[at + 1]!r}",
            )
    covers = "every difference to the largest that bf16 or fp16 inputs of one sign can have"
    return Proof("enumeration of the real kernel", covers, cases)


def prove_shift(subject: Subject) -> Proof:
    """Rows (c, c − d) and (0, −d) have the same bits wherever c − d is exact."""
    down = every_difference(torch.float16)
    whole = subject(torch.stack([torch.zeros_like(down), down], -1), -1)
    cases = 0
    for shift in (1.0, -1.0, 3.0, -7.0, 64.0, 100.0, -1000.0, 2.0**14):
        moved = torch.stack([torch.full_like(down, shift), down + shift], -1)
        exact = (moved[:, 1].double() - shift) == down.double()
        cases += int(exact.sum())
        found: Any = bits.first_difference(subject(moved, -1)[exact], whole[exact])
        if found is not None:
            return Proof(
                "enumeration of the real kernel", "", cases, f"shifted by {shift}: {found}"
            )
    return Proof(
        "enumeration of the real kernel",
        "rows of 2: every fp16 difference, 8 shifts, where exact",
        cases,
    )
