"""Claims of softmax-kernel-v1: exact shifts, rows of one, rows without an answer; planted wrong softmaxes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import THREADS
from isobit.foundation.records import Proof
from isobit.library.certificates import (
    EXP_ERROR,
    Question,
    U,
    feature_order,
    on_all_threads,
    prove_bound,
    prove_orders,
)
from isobit.library.claims import Subject
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.softmax import portable
from isobit.ops.softmax.op import softmax
from isobit.order.tree import merge
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget


def portable_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the portable executor's result: the same order in plain torch operations."""
    return portable.softmax(x)


def shifts(subject: Subject, case: Case, tally: Tally) -> None:
    """A shift that is exact changes no bit: only differences to the largest element matter."""
    # On a grid, so that x + c is exact.
    x = (case.arguments["x"].float().clamp(-64, 64) * 256).round() / 256
    tally.count(case.rows)
    whole = subject(x)
    for shift in (1.0, -3.0, 64.0, -1000.0):
        tally.same(subject(x + shift), whole, f"shifted by {shift}")


def one_is_one(subject: Subject, case: Case, tally: Tally) -> None:
    """A row of one finite element is exactly 1."""
    tally.count(case.rows)
    found = subject(case.arguments["x"][:, :1])
    tally.same(found, torch.ones_like(found), "a row of one")


def has_no_answer(subject: Subject, case: Case, tally: Tally) -> None:
    """A row with a NaN or +inf, or of -inf alone, is the canonical NaN; other rows do not change."""
    x = case.arguments["x"].clone()
    wrong = torch.arange(len(x)) % 2 == 0
    for place, value in ((0, torch.nan), (-1, torch.inf), (slice(None), -torch.inf)):
        spoilt = x.clone()
        spoilt[wrong, place] = value
        found = subject(spoilt)
        nan = torch.full_like(found[wrong], torch.nan)
        tally.same(found[wrong], nan, f"rows spoilt by {value}")
        tally.same(found[~wrong], subject(x)[~wrong], f"rows next to rows spoilt by {value}")
    tally.count(case.rows)


# ---- planted --------------------------------------------------------------------------------------------


def without_shift(x: Tensor, dim: int = -1) -> Tensor:
    """Do not subtract the maximum, so that terms overflow."""
    terms = torch.exp(x.float())
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def over_the_batch(x: Tensor, dim: int = -1) -> Tensor:
    """Subtract the maximum of the whole batch."""
    terms = exp_nonpositive(x.float() - x.float().amax()) if x.numel() else x.float()
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def without_the_last(x: Tensor, dim: int = -1) -> Tensor:
    """Leave the last element out of the denominator."""
    terms = torch.exp(x.float() - x.float().amax(-1, keepdim=True)) if x.numel() else x.float()
    return (terms / (terms[..., :-1].sum(-1, keepdim=True) + 2.0**-100)).to(x.dtype)


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """Sum in another order where there are few rows."""
    return softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else softmax(x)


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """Replace a row without an answer by zeros, a common patch in masked attention."""
    return softmax(x).nan_to_num(0.0)


def a_hair_less(x: Tensor, dim: int = -1) -> Tensor:
    """Add an epsilon to the denominator, as norms do."""
    return softmax(x) * (1 - 2.0**-20)


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """Fall by 2 % between -1 and -0.99, where results should rise."""
    y = softmax(x)
    return torch.where((x > -1.0) & (x < -0.99), y * 0.98, y)


# Proofs about softmax: order by certificate, error and sum by intervals, range by Bitwuzla, exp by enumeration.

WIDTHS, ROWS = (64, 300, 1024), (1, 5, 33)
BOUNDED = (1, 16, 64, 1024, 4096, 32000, 131072, 151936)
# As the contract states them: (width, limit).
SUM_LIMIT, ERROR_LIMIT = (1024, 2e-6), (64, 1.2e-5)


def question(subject: Subject, width: int) -> Question:
    """Ask for the order of the denominator, at every row count and number of threads."""

    def target(m: int) -> TensorTarget:
        return targets.softmax(width, m, function=subject)

    shapes = on_all_threads({"m": m} for m in ROWS)
    return Question(f"rows of {width}", target, shapes, feature_order(width, "striped"))


def prove_order(subject: Subject) -> Proof:
    """Certify the order of the denominator, and compare bits with the portable definition."""
    covers = (
        f"fp32 rows of {list(WIDTHS)}, {list(ROWS)} of them, {list(THREADS)} threads: the denominator "
        "is summed in the defined order (shown by probing), everything else is elementwise"
    )
    proof = prove_orders((question(subject, width) for width in WIDTHS), covers)
    for width in WIDTHS if proof.kept else ():
        x = draw_values((257, width), "logits", torch.Generator().manual_seed(width))
        difference = bits.first_difference(subject(x, -1), portable.softmax(x))
        if difference is not None:
            failure = f"rows of {width} against the definition: {difference}"
            return Proof(proof.engine, "", proof.cases, failure)
    return proof


def grown_sum(width: int) -> Any:
    """Return (1 + u)^depth of the sum over a row, as an interval."""
    return (1 + load_arb()(U)) ** depth_of(feature_order(width, "striped"))


def sum_bound(width: int) -> float:
    """Bound |Σy − 1| for rows whose results do not underflow.

    Terms are positive, so the computed sum is the sum of terms each off by at most the depth's roundings.
    """
    return float(((1 + load_arb()(U)) / (2 - grown_sum(width)) - 1).abs_upper())


def error_bound(width: int) -> float:
    """Bound the relative error of y for rows whose results do not underflow.

    A difference x − max rounded to fp32 moves its exponential by u·|x − max|, at most 88·u where it counts.
    """
    arb = load_arb()
    u, exp = arb(U), arb(EXP_ERROR) * 2 * arb(U)
    above, below = (1 + u) * (1 + exp) * (1 + 88 * u), (1 - exp) * (1 - 88 * u)
    return float((above / (below * (2 - grown_sum(width))) - 1).abs_upper())


def prove_sum(subject: Subject) -> Proof:
    """Bound how far the outputs of a row are from summing to 1."""
    covers = "all fp32 rows whose results do not underflow: |Σy − 1| is at most"
    return prove_bound(prove_order(subject), sum_bound, BOUNDED, SUM_LIMIT, covers)


def prove_error(subject: Subject) -> Proof:
    """Bound the relative error against exact arithmetic."""
    covers = "all fp32 rows whose results do not underflow: the relative error of y is at most"
    return prove_bound(prove_order(subject), error_bound, BOUNDED, ERROR_LIMIT, covers)


def prove_range(subject: Subject) -> Proof:
    """Prove 0 ≤ y ≤ 1 in IEEE arithmetic for all exponentials in [0, 1] whose largest is 1."""
    engine, cases = "Bitwuzla on the IEEE model", 0
    for width in (2, 3, 8):
        x = draw_values((4096, width), "logits", torch.Generator().manual_seed(width))
        if not bits.equal(subject(x, -1), by_model(x)):
            failure = f"the model of rows of {width} is not what the kernel does"
            return Proof(engine, "", cases + 1, failure)
        for i in range(width):
            cases += 1
            if not smt.is_unsatisfiable(range_formula(width, i)):
                return Proof(engine, "", cases, f"outside [0, 1] at place {i} of {width}")
    covers = (
        "all fp32 rows of 2, 3 and 8; exp abstracted by its range; the model agrees with the kernel "
        "on 12,288 rows"
    )
    return Proof(engine, covers, cases)


def by_model(x: Tensor) -> Tensor:
    """Compute what the formula models: each term a lane, lanes merged by the tree, one division."""
    terms = exp_nonpositive(x - x.amax(-1, keepdim=True))
    lanes = list(terms.unbind(-1)) + [torch.zeros(len(x))] * (16 - x.shape[-1])
    return terms / merge(lanes, torch.add).unsqueeze(-1)


def range_formula(width: int, place: int) -> str:
    """Return a formula that is satisfiable if some y is outside [0, 1]."""
    names = [f"e{i}" for i in range(width)]
    zero, one = smt.number(0.0), smt.number(1.0)
    text = smt.declare(names)
    text += "".join(f"(assert (and (fp.leq {zero} {n}) (fp.leq {n} {one})))\n" for n in names)
    text += f"(assert (or {' '.join(f'(fp.eq {n} {one})' for n in names)}))\n"
    total = merge([*names, *[zero] * (16 - width)], smt.add)
    text += f"(define-fun y () F (fp.div RNE e{place} {total}))\n"
    return text + f"(assert (not (and (fp.leq {zero} y) (fp.leq y {one}))))\n"


def every_difference(dtype: torch.dtype) -> Tensor:
    """Return every finite value of a 16-bit dtype that is not positive, ascending, as fp32."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.unique(values[values.isfinite() & (values <= 0)].float())  # type: ignore[no-any-return]


def prove_monotone(subject: Subject) -> Proof:
    """Try one row that holds every difference: a larger one must not have a smaller result."""
    rows = (every_difference(dtype) for dtype in (torch.bfloat16, torch.float16))
    covers = "every difference to the largest that bf16 or fp16 inputs of one sign can have"
    return prove_rising(subject, rows, covers)


def prove_rising(subject: Subject, rows: Iterable[Tensor], covers: str) -> Proof:
    """Call the subject on each ascending row: its results must ascend too."""
    engine, cases = "enumeration of the real kernel", 0
    for row in rows:
        found = subject(row.unsqueeze(0), -1)[0]
        cases += len(row)
        wrong = (found[1:] < found[:-1]).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return Proof(engine, "", cases, f"falls from {row[at]!r} to {row[at + 1]!r}")
    return Proof(engine, covers, cases)


def prove_shift(subject: Subject) -> Proof:
    """Compare rows (c, c − d) with (0, −d) wherever c − d is exact."""
    engine, cases = "enumeration of the real kernel", 0
    down = every_difference(torch.float16)
    whole = subject(torch.stack([torch.zeros_like(down), down], -1), -1)
    for shift in (1.0, -1.0, 3.0, -7.0, 64.0, 100.0, -1000.0, 2.0**14):
        moved = torch.stack([torch.full_like(down, shift), down + shift], -1)
        exact = (moved[:, 1].double() - shift) == down.double()
        cases += int(exact.sum())
        found = bits.first_difference(subject(moved, -1)[exact], whole[exact])
        if found is not None:
            return Proof(engine, "", cases, f"shifted by {shift}: {found}")
    return Proof(engine, "rows of 2: every fp16 difference, 8 shifts, where exact", cases)
