"""Claims of log-softmax-kernel-v1: probabilities sum to 1, and dx is the portable executor's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.proofs import smt
from isobit.contracts.judge.proofs.intervals import depth_of, load_arb
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.foundation.records import Proof
from isobit.library import stock
from isobit.library.certificates import (
    EXP_ERROR,
    Question,
    U,
    feature_order,
    prove_bound,
    prove_orders,
)
from isobit.library.claims import Subject, gradients, with_value
from isobit.library.softmax import BOUNDED, prove_rising
from isobit.ops.log_softmax import portable
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import MaxSum, sum_pairs
from isobit.order.evaluate import expected_tree
from isobit.order.plan import FeaturePlan
from isobit.order.tree import merge
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget

# Proofs about log-softmax and the log-sum-exp it shares with log-probabilities: order, logarithm, error, sign.

# (width, rows, threads): one segment, four segments, one long segment with a tail.
SUMS = ((64, 5, 1), (300, 33, 1), (64, 33, 2), (1024, 5, 1), (1101, 33, 1))
ERROR_LIMIT = (64, 2.5e-5)  # as the contract states it
LOG_ERROR = 1.0  # ulp of the result; `prove_logarithm` tries every mantissa
CHUNK = 2**16  # fits the cache
SWEPT = range(-126, 128)
EQUAL = 600  # rows of fewer than so many equal logits, whose sum is their number
REACH = 100.0  # bounds are stated for logits at most this much below the largest
FAR = 88.0  # beyond it an exponential is below 2^-126


def prove_order(subject: Subject, sums: Sequence[tuple[int, int, int]] = SUMS) -> Proof:
    """Certify the order of the sum at several row counts, and compare bits with the portable definition."""

    def question(width: int, rows: int, threads: int) -> Question:
        def target(m: int) -> TensorTarget:
            return targets.log_softmax(width, m, function=lambda x, _: subject(x, -1))

        configurations = [{"m": rows, "threads": threads}]
        order = feature_order(width, "striped")
        return Question(f"rows of {width}", target, configurations, order)

    covers = (
        f"fp32 rows at (width, rows, threads) of {list(sums)}: Σ exp, in pairs of maximum and sum, is "
        "in the defined order (shown by probing); bits are the definition's at 1, 5 and 65 rows; all "
        "else is elementwise"
    )
    proof = prove_orders((question(*sizes) for sizes in sums), covers)
    for width in {width for width, *_ in sums} if proof.kept else ():
        x = draw_values((65, width), "logits", torch.Generator().manual_seed(width))
        for rows in (1, 5, 65):
            wanted = portable.log_softmax(x[:rows])
            difference = bits.first_difference(subject(x[:rows], -1), wanted)
            if difference is not None:
                failure = f"rows of {width} against the definition: {difference}"
                return Proof(proof.engine, "", proof.cases, failure)
    return proof


def prove_error(subject: Subject) -> Proof:
    """Bound the error against exact arithmetic over the certified order."""
    return prove_log_bound(prove_order(subject, SUMS[:2]), ERROR_LIMIT)


def prove_monotone(subject: Subject) -> Proof:
    """Try a row of every finite bf16 value, and one of fp16: a larger one must not have a smaller result."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        raw = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        rows.append(torch.unique(raw[raw.isfinite() & (raw.abs() < 2.0**15)].float()))
    return prove_rising(subject, rows, "every bf16 and fp16 value below 2^15 in one row")


def log_error(x: Tensor) -> tuple[float, bool]:
    """Return the largest error of log_positive in ulp, and whether it is monotone on ascending x."""
    found, true = log_positive(x), x.double().log()
    # The exponent of the next smaller number: an ulp at most.
    below = (found.view(torch.int32) - 1) & 0x7F800000
    ulp = below.view(torch.float32).double() * 2.0**-23
    gap = (found.double() - true).abs()
    # log 1 is 0, and no other is.
    error = torch.where((true == 0) | (found == 0), gap * torch.inf, gap / ulp)
    return float(error.nan_to_num(0.0).max()), bool((found[1:] >= found[:-1]).all())


def mantissas(exponent: int, first: int, stop: int, step: int = 1) -> Tensor:
    """Return fp32 numbers of one exponent, ascending."""
    raw = torch.arange(first, stop, step, dtype=torch.int32) | ((exponent + 127) << 23)
    return raw.view(torch.float32)


def prove_logarithm(rows: Subject) -> Proof:
    """Try every mantissa from 1 to 4 and a sweep of all exponents; the kernel must use this logarithm."""
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
    wanted = pair - log_positive(1 + exp_nonpositive(down)).unsqueeze(1)
    found = bits.first_difference(rows(pair), wanted)
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


def roundings(width: int) -> tuple[int, int]:
    """Return the most additions and rescalings that a term passes."""
    plan = FeaturePlan(width)
    merges = plan.count.bit_length() - 1
    return depth_of(expected_tree(plan.segments[:1], "striped")) + merges, merges


def bound_of(width: int, reach: float) -> float:
    """Bound the absolute error of a log-probability whose fp32 logit is `reach` below the largest.

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


def prove_log_bound(order: Proof, stated: tuple[int, float]) -> Proof:
    """Bound the error of a log-probability over a certified order; it must be within the stated limit."""
    covers = (
        f"fp32 logits that are at most {REACH:g} below the row's largest where they are read: the "
        "log-probability is off by at most"
    )
    return prove_bound(order, partial(bound_of, reach=REACH), BOUNDED, stated, covers)


def prove_sign(rows: Subject) -> Proof:
    """Prove in IEEE arithmetic that no log-probability is positive.

    Assumed are exp in [0, 1] with exp(0) = 1, and a logarithm that is not negative from 1 on: softmax's
    tests and `prove_logarithm` show these.
    """
    engine, cases = "Bitwuzla on the IEEE model", 0
    for width in (2, 3, 8):
        x = 10 * torch.randn(4096, width, generator=torch.Generator().manual_seed(width))
        cases += 1
        if not bits.equal(rows(x), by_model(x)):
            failure = f"the model of rows of {width} is not what the kernel does"
            return Proof(engine, "", cases, failure)
        if not smt.is_unsatisfiable(sum_formula(width)):
            return Proof(engine, "", cases, f"a segment of {width} with a sum below 1")
    for formula in (merge_formula(), result_formula()):
        cases += 1
        if not smt.is_unsatisfiable(formula):
            return Proof(engine, "", cases, "a merge below 1, or a positive result")
    wide = 10 * torch.randn(64, 1100, generator=torch.Generator().manual_seed(11))
    total = sum_pairs(wide)
    if not bits.equal(rows(wide), (wide - total.max) - log_positive(total.sum)):
        return Proof(engine, "", cases, "rows of 1100 are not merged as in the model")
    covers = (
        "every fp32 row whose segments have 2, 3 or 8 columns, and every merge of two: the sum is "
        "at least 1 and the result at most 0; exp and log abstracted by range; the model agrees with "
        "the kernel on 12,352 rows"
    )
    return Proof(engine, covers, cases)


def by_model(x: Tensor) -> Tensor:
    """Compute what the formulas model."""
    most = x.amax(-1, keepdim=True)
    lanes = list(exp_nonpositive(x - most).unbind(-1)) + [torch.zeros(len(x))] * (16 - x.shape[-1])
    return (x - most) - log_positive(merge(lanes, torch.add)).unsqueeze(-1)


def in_unit(*names: str) -> str:
    """Assert that each name is in [0, 1], as an exponential is."""
    zero, one = smt.number(0.0), smt.number(1.0)
    return "".join(f"(assert (and (fp.leq {zero} {n}) (fp.leq {n} {one})))\n" for n in names)


def sum_formula(width: int) -> str:
    """Return a formula that is satisfiable if a segment's sum, one of whose terms is 1, is below 1."""
    names, one = [f"e{i}" for i in range(width)], smt.number(1.0)
    text = smt.declare(names) + in_unit(*names)
    text += f"(assert (or {' '.join(f'(fp.eq {n} {one})' for n in names)}))\n"
    total = merge([*names, *[smt.number(0.0)] * (16 - width)], smt.add)
    return text + f"(assert (not (fp.leq {one} {total})))\n"


def merge_formula() -> str:
    """Return a formula that is satisfiable if two sums ≥ 1, one with the factor 1, merge to less than 1."""
    one = smt.number(1.0)
    text = smt.declare(["a", "b", "f", "g"]) + in_unit("f", "g")
    text += f"(assert (and (fp.leq {one} a) (fp.leq {one} b) (not (fp.isInfinite a)) (not (fp.isInfinite b))))\n"
    text += f"(assert (or (fp.eq f {one}) (fp.eq g {one})))\n"
    total = smt.add("(fp.mul RNE a f)", "(fp.mul RNE b g)")
    return text + f"(assert (not (fp.leq {one} {total})))\n"


def result_formula() -> str:
    """Return a formula that is satisfiable if (x − max) − log > 0 or NaN for x ≤ max and log ≥ 0."""
    zero = smt.number(0.0)
    text = smt.declare(["x", "most", "log"])
    text += "".join(
        f"(assert (not (or (fp.isNaN {n}) (fp.isInfinite {n}))))\n" for n in ("x", "most", "log")
    )
    text += f"(assert (and (fp.leq x most) (fp.leq {zero} log)))\n"
    return text + f"(assert (not (fp.leq (fp.sub RNE (fp.sub RNE x most) log) {zero})))\n"


def reach_of(logits: Tensor) -> float:
    """Return the largest distance of a logit to the largest of its row."""
    return float((logits.amax(-1) - logits.amin(-1)).max()) if logits.numel() else 0.0


def portable_log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return the portable executor's result."""
    return portable.log_softmax(x)


def adds_up(subject: Subject, case: Case, tally: Tally) -> None:
    """Probabilities sum to 1 within twice the bound of the order."""
    x = case.arguments["x"]
    tally.count(case.rows)
    sums = subject(x).double().exp().sum(-1)
    # At d below the largest, the error grows with d and the probability falls with e^-d: 10 is enough.
    limit = 2 * bound_of(x.shape[-1], 10.0)
    tally.true((sums - 1).abs() <= limit, f"|Σp − 1| over {limit:g}", sums)


def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """The gradient dx has the portable executor's bits."""
    x, grad = case.arguments["x"], case.draw(case.shape_of("x"), 20, "wide")
    tally.count(case.rows)
    wanted = portable.log_softmax_backward(grad, portable.log_softmax(x))
    tally.same(gradients(subject, [x], grad)[0], wanted, "dx against the other executor")


# Planted wrong log-softmaxes, and planted wrong log-sum-exps that log-probabilities use too.

LogSumExp = Callable[[Tensor], MaxSum]


def _cut_by_threads(logits: Tensor) -> MaxSum:
    """Sum a run of columns per thread, merged in order."""
    return reduce(add, [sum_pairs(part) for part in logits.chunk(torch.get_num_threads(), 1)])


def _not_rescaled(logits: Tensor) -> MaxSum:
    """Add the sum of a run as it is, though the maximum has changed."""
    plan = FeaturePlan(logits.shape[1])
    size = max(min(plan.length, 512), 1)
    parts = [sum_pairs(logits[:, at : at + size]) for at in range(0, logits.shape[1], size)]
    most = torch.stack([p.max for p in parts]).amax(0)
    return MaxSum(most, torch.stack([p.sum for p in parts]).sum(0))


def _without_the_tail(logits: Tensor) -> MaxSum:
    """Leave out the columns after the last whole vector."""
    whole = logits.shape[1] // 16 * 16
    if not whole:
        return sum_pairs(logits)
    return MaxSum(logits.amax(1, keepdim=True), sum_pairs(logits[:, :whole]).sum)


def _over_the_batch(logits: Tensor) -> MaxSum:
    """Subtract the largest logit of the whole batch."""
    most = logits.amax().reshape(1, 1).expand(len(logits), 1)
    terms = exp_nonpositive(logits - most)
    return MaxSum(most, terms.sum(1, keepdim=True).clamp(min=math.ldexp(1, -126)))


WRONG_SUMS: dict[str, LogSumExp] = {
    "over_the_batch": _over_the_batch,
    "cut_by_threads": _cut_by_threads,
    "not_rescaled": _not_rescaled,
    "without_the_tail": _without_the_tail,
}


def with_sum(sum_of: LogSumExp) -> Subject:
    """Return a log-softmax with another log-sum-exp; its dx is right."""

    def function(x: Tensor, dim: int = -1) -> Tensor:
        right = log_softmax(x)
        if not x.numel():
            return right
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        total = sum_of(rows)
        wrong = ((rows - total.max) - log_positive(total.sum)).to(x.dtype).reshape(x.shape)
        return with_value(right, wrong)

    return function


over_the_batch, cut_by_threads, not_rescaled, without_the_tail = map(with_sum, WRONG_SUMS.values())


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """Sum in another order where there are few rows."""
    return log_softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else log_softmax(x)


def log_of_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return log(softmax(x)), which is −inf where the softmax underflows."""
    return torch.log(torch.softmax(x, -1))


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """Replace a row without an answer by zeros."""
    return log_softmax(x).nan_to_num(0.0)


def a_hair_more(x: Tensor, dim: int = -1) -> Tensor:
    """Add 2^-15, as an epsilon inside the logarithm would."""
    return log_softmax(x) + 2.0**-15


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """Fall by 0.5 between 1 and 1.01, where results should rise."""
    y = log_softmax(x)
    return torch.where((x > 1.0) & (x < 1.01), y - 0.5, y)


def plain_gradient(x: Tensor, dim: int = -1) -> Tensor:
    """Return the right values with stock's dx."""
    return with_value(stock.log_softmax(x), log_softmax(x.detach()))
