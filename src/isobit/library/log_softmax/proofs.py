"""Proofs about the log-sum-exp that log-softmax and log-probabilities share: its logarithm, its error, its sign."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.library.softmax.proofs import EXP_ERROR, U
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.log_sum_exp import MaxSum, sum_pairs
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.tree import merge
from isobit.records import Proof

Rows = Callable[[Tensor], Tensor]  # [R, n] logits to [R, n] log-probabilities

LOG_ERROR = 1.0  # ulp of the result; `prove_logarithm` tries every mantissa
CHUNK = 2**16  # what stays in the cache
SWEPT = range(-126, 128)
EQUAL = 600  # rows of up to so many equal logits, whose sum is their number
BOUNDED = (1, 16, 64, 1024, 4096, 32000, 131072, 151936)
FAR = 88.0  # beyond it an exponential is below 2^-126


def log_error(x: Tensor) -> tuple[float, bool]:
    """The largest error of log_positive in ulp, and whether larger arguments have no smaller results."""
    found, true = log_positive(x), x.double().log()
    below = (
        found.view(torch.int32) - 1
    ) & 0x7F800000  # the exponent of the next smaller number: an ulp at most
    ulp = below.view(torch.float32).double() * 2.0**-23
    gap = (found.double() - true).abs()
    error = torch.where(
        (true == 0) | (found == 0), gap * torch.inf, gap / ulp
    )  # log 1 is 0, and no other is
    return float(error.nan_to_num(0.0).max()), bool((found[1:] >= found[:-1]).all())


def mantissas(exponent: int, first: int, stop: int, step: int = 1) -> Tensor:
    """fp32 numbers of one exponent, ascending."""
    raw = torch.arange(first, stop, step, dtype=torch.int32) | ((exponent + 127) << 23)
    return raw.view(torch.float32)


def prove_logarithm(rows: Rows) -> Proof:
    """Every mantissa from 1 to 4, a sweep of all exponents; and the kernel's logarithm has these bits."""
    engine, cases = "enumeration of the logarithm", 0
    pieces = [(e, at, min(at + CHUNK + 1, 2**23)) for e in (0, 1) for at in range(0, 2**23, CHUNK)]
    parts = [mantissas(*piece) for piece in pieces]
    parts.append(torch.cat([mantissas(e, 0, 2**23, 2**17 - 1) for e in SWEPT]))
    for x in parts:
        cases += len(x)
        error, rises = log_error(x)
        if not (error <= LOG_ERROR and rises):
            return Proof(engine, "", cases, f"from {x[0]!r}: {error:.3g} ulp, monotone: {rises}")
    down = -torch.linspace(0, 20, 100_001)
    pair = torch.stack([torch.zeros_like(down), down], 1)
    wanted = torch.stack(
        [
            0.0 - log_positive(1 + exp_nonpositive(down)),
            down - log_positive(1 + exp_nonpositive(down)),
        ]
    )
    found = bits.first_difference(rows(pair), wanted.t().contiguous())
    if found is not None:
        return Proof(engine, "", cases, f"rows of two against the definition: {found}")
    for n in range(1, EQUAL):
        cases += 1
        wanted = 0.0 - log_positive(torch.tensor([[float(n)]])).expand(1, n)
        if not bits.equal(rows(torch.full((1, n), 3.25)), wanted.contiguous()):
            return Proof(engine, "", cases, f"a row of {n} equal logits is not −log {n}")
    covers = (
        f"log within {LOG_ERROR:g} ulp and monotone: every fp32 number from 1 to 4, and 65 of every exponent; the "
        f"kernel has these bits on 100,001 rows of two, and on rows of 1 to {EQUAL - 1} equal logits"
    )
    return Proof(engine, covers, cases + len(down))


# ---- the error -------------------------------------------------------------------------------------------


def roundings(width: int) -> tuple[int, int]:
    """(additions, rescalings) that a term passes, at most."""
    plan = FeaturePlan(width)
    segments = plan.segments
    merges = plan.count.bit_length() - 1
    return depth_of(expected_tree(segments[:1], "striped")) + merges, len(segments[0]) - 1 + merges


def bound_of(width: int, reach: float) -> float:
    """The absolute error of a log-probability whose fp32 logit is `reach` below the largest, from above.

    A term e^(x − max) is off by its exponential, by each rescaling (an exponential and a product), by the rounded
    differences, which add up to at most 88 u, and by the additions; what underflows is at most 2^-125 a term.
    """
    arb = load_arb()
    u, exp = arb(U), arb(EXP_ERROR) * 2 * arb(U)
    additions, rescalings = roundings(width)
    grown = (
        (1 + u) ** (additions + rescalings) * (1 + exp) ** (rescalings + 1) * (arb(FAR) * u).exp()
    )
    lost = (grown - 1) + arb(width) * arb(2) ** -125
    log_sum = arb(width).log()
    of_log = -((1 - lost).log()) + arb(LOG_ERROR) * 2 * u * (log_sum + lost)
    differences = u * arb(reach) + u * (arb(reach) * (1 + u) + log_sum + of_log)
    return float((of_log + differences).abs_upper())


def say_bounds(reach: float) -> str:
    """In words, over widths of vocabularies."""
    return ", ".join(f"{bound_of(n, reach):.2g} at {n}" for n in BOUNDED)


# ---- the sign --------------------------------------------------------------------------------------------


def prove_sign(rows: Rows) -> Proof:
    """In IEEE arithmetic no log-probability is positive, whatever exp and log are, if exp is in [0, 1] and is 1 at 0,
    and log of what is at least 1 is not negative: `prove_logarithm` and softmax's tests show both."""
    engine, cases = "Bitwuzla on the IEEE model", 0
    for width in (2, 3, 8):
        x = 10 * torch.randn(4096, width, generator=torch.Generator().manual_seed(width))
        if not bits.equal(rows(x), by_model(x)):
            return Proof(
                engine, "", cases + 1, f"the model of rows of {width} is not what the kernel does"
            )
        cases += 1
        if not smt.is_unsatisfiable(sum_formula(width)):
            return Proof(engine, "", cases, f"a leaf of {width} with a sum below 1")
    for formula in (merge_formula(), result_formula()):
        cases += 1
        if not smt.is_unsatisfiable(formula):
            return Proof(engine, "", cases, "a merge below 1, or a positive result")
    wide = 10 * torch.randn(64, 1100, generator=torch.Generator().manual_seed(11))
    total = sum_pairs(wide)
    if not bits.equal(rows(wide), (wide - total.max) - log_positive(total.sum)):
        return Proof(engine, "", cases, "rows of 1100 are not merged as the model says")
    covers = (
        "every fp32 row whose leaves have 2, 3 or 8 columns, and every merge of two leaves: the sum is at least 1 and "
        "the result at most 0; exp and log abstracted by range; the model agrees with the kernel on 12,352 rows"
    )
    return Proof(engine, covers, cases)


def by_model(x: Tensor) -> Tensor:
    """What the formulas say, carried out."""
    most = x.amax(-1, keepdim=True)
    lanes = list(exp_nonpositive(x - most).unbind(-1)) + [torch.zeros(len(x))] * (16 - x.shape[-1])
    return (x - most) - log_positive(merge(lanes, torch.add)).unsqueeze(-1)


def in_unit(*names: str) -> str:
    """Each is what an exponential can be."""
    zero, one = smt.number(0.0), smt.number(1.0)
    return "".join(f"(assert (and (fp.leq {zero} {n}) (fp.leq {n} {one})))\n" for n in names)


def sum_formula(width: int) -> str:
    """Satisfiable if a leaf's sum, one of whose terms is 1, is below 1."""
    names, one = [f"e{i}" for i in range(width)], smt.number(1.0)
    text = (
        smt.declare(names)
        + in_unit(*names)
        + f"(assert (or {' '.join(f'(fp.eq {n} {one})' for n in names)}))\n"
    )
    total = merge([*names, *[smt.number(0.0)] * (16 - width)], smt.add)
    return text + f"(assert (not (fp.leq {one} {total})))\n"


def merge_formula() -> str:
    """Satisfiable if two sums of at least 1, one of whose factors is 1, merge to less than 1."""
    one = smt.number(1.0)
    text = smt.declare(["a", "b", "f", "g"]) + in_unit("f", "g")
    text += f"(assert (and (fp.leq {one} a) (fp.leq {one} b) (not (fp.isInfinite a)) (not (fp.isInfinite b))))\n"
    text += f"(assert (or (fp.eq f {one}) (fp.eq g {one})))\n"
    total = smt.add("(fp.mul RNE a f)", "(fp.mul RNE b g)")
    return text + f"(assert (not (fp.leq {one} {total})))\n"


def result_formula() -> str:
    """Satisfiable if (x − max) − log is positive or NaN, where x ≤ max and the logarithm is not negative."""
    zero = smt.number(0.0)
    text = smt.declare(["x", "most", "log"])
    text += "".join(
        f"(assert (not (or (fp.isNaN {n}) (fp.isInfinite {n}))))\n" for n in ("x", "most", "log")
    )
    text += f"(assert (and (fp.leq x most) (fp.leq {zero} log)))\n"
    return text + f"(assert (not (fp.leq (fp.sub RNE (fp.sub RNE x most) log) {zero})))\n"


def reach_of(logits: Tensor) -> float:
    """How far below the largest a logit of these rows stands, at most."""
    return float((logits.amax(-1) - logits.amin(-1)).max()) if logits.numel() else 0.0


def cut_by_threads(logits: Tensor) -> MaxSum:
    """Planted: a run of columns a thread, merged as they come."""
    parts = [sum_pairs(part) for part in logits.chunk(torch.get_num_threads(), 1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def not_rescaled(logits: Tensor) -> MaxSum:
    """Planted: a leaf's sum is added as it is, though the maximum has moved."""
    plan = FeaturePlan(logits.shape[1])
    size = max(min(plan.length, 512), 1)
    parts = [sum_pairs(logits[:, at : at + size]) for at in range(0, logits.shape[1], size)]
    most = torch.stack([p.max for p in parts]).amax(0)
    return MaxSum(most, torch.stack([p.sum for p in parts]).sum(0))


def without_the_tail(logits: Tensor) -> MaxSum:
    """Planted: columns after the last whole vector are not summed."""
    whole = logits.shape[1] // 16 * 16
    return (
        MaxSum(logits.amax(1, keepdim=True), sum_pairs(logits[:, :whole]).sum)
        if whole
        else sum_pairs(logits)
    )


def over_the_batch(logits: Tensor) -> MaxSum:
    """Planted: the largest of the whole batch is subtracted."""
    most = logits.amax().reshape(1, 1).expand(len(logits), 1)
    terms = exp_nonpositive(logits - most)
    return MaxSum(most, terms.sum(1, keepdim=True).clamp(min=math.ldexp(1, -126)))


PLANTED = {f.__name__: f for f in (cut_by_threads, not_rescaled, without_the_tail, over_the_batch)}
