"""What log-softmax-kernel-v1 claims beyond the library, its proofs, and planted wrong log-softmaxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case, draw_values
from isobit.contracts.judge.tally import Tally
from isobit.library.log_softmax import proofs
from isobit.library.logprob.orders import bounded, prove, words_order
from isobit.library.logprob.planted import Replaced
from isobit.library.questions import Question
from isobit.machine import thread_count
from isobit.ops.log_softmax import portable
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.elementary import log_positive
from isobit.ops.portable.log_sum_exp import MaxSum
from isobit.records import Proof
from isobit.reveal import targets
from isobit.reveal.targets.tensor_target import TensorTarget

Subject = Callable[..., Tensor]

# (width, rows, threads): one leaf, four segments, three folded leaves.
SUMS = ((64, 5, 1), (300, 33, 1), (64, 33, 2), (1024, 5, 1), (1101, 33, 1))
ERROR_LIMIT = (64, 2.5e-5)  # as the contract states it


def stock(x: Tensor, dim: int = -1) -> Tensor:
    """torch's own."""
    return torch.log_softmax(x, dim)


def portable_log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The other executor."""
    return portable.log_softmax(x)


def gradient_of(subject: Subject, x: Tensor, grad: Tensor) -> Tensor:
    """dx, by autograd."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(subject(leaf), leaf, grad)[0]


def adds_up(subject: Subject, case: Case, tally: Tally) -> None:
    """Probabilities sum to 1 within twice the bound of the order."""
    x = case.arguments["x"]
    tally.count(case.rows)
    sums = subject(x).double().exp().sum(-1)
    limit = 2 * proofs.bound_of(
        x.shape[-1], 10.0
    )  # beyond 10, e^-d outweighs what d adds to the error
    tally.true((sums - 1).abs() <= limit, f"|Σp − 1| over {limit:g}", sums)


def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """dx has the portable executor's bits."""
    x, grad = case.arguments["x"], case.draw(case.shape_of("x"), 20, "wide")
    tally.count(case.rows)
    wanted = portable.log_softmax_backward(grad, portable.log_softmax(x))
    tally.same(gradient_of(subject, x, grad), wanted, "dx against the other executor")


# ---- proofs ----------------------------------------------------------------------------------------------


def prove_order(subject: Subject, sums: Sequence[tuple[int, int, int]] = SUMS) -> Proof:
    """The sum's order is the defined one at every row count; and the bits are the portable definition's."""
    questions: list[Question] = []
    for width, rows, threads in sums:

        def make(m: int, width: int = width) -> TensorTarget:
            return targets.log_softmax(width, m, function=lambda x, _: subject(x, -1))

        questions.append(
            (f"rows of {width}", make, [{"m": rows, "threads": threads}], words_order(width))
        )
    with thread_count(1):
        proof = prove(questions, "")
    for width in {width for width, *_ in sums} if proof.kept else ():
        x = draw_values((65, width), "logits", torch.Generator().manual_seed(width))
        for rows in (1, 5, 65):
            difference = bits.first_difference(
                subject(x[:rows], -1), portable.log_softmax(x[:rows])
            )
            if difference is not None:
                return Proof(
                    proof.engine,
                    "",
                    proof.cases,
                    f"rows of {width} against the definition: {difference}",
                )
    covers = (
        f"fp32 rows at (width, rows, threads) of {list(sums)}: Σ exp, in pairs of maximum and sum, is in the defined "
        "order (shown by probing); bits are the definition's at 1, 5 and 65 rows; all else is elementwise"
    )
    return Proof(proof.engine, covers, proof.cases, proof.failure)


def prove_error(subject: Subject) -> Proof:
    """The error against exact arithmetic is within the bound of the certified order."""
    return bounded(prove_order(subject, SUMS[:2]), *ERROR_LIMIT)


def prove_sign(subject: Subject) -> Proof:
    """No result is positive."""
    return proofs.prove_sign(lambda x: subject(x, -1))


def prove_logarithm(subject: Subject) -> Proof:
    """The logarithm inside, at every mantissa."""
    return proofs.prove_logarithm(lambda x: subject(x, -1))


def prove_monotone(subject: Subject) -> Proof:
    """One row that holds every finite fp16 value, and one of bf16: a larger one has no smaller result."""
    cases = 0
    for dtype in (torch.bfloat16, torch.float16):
        raw = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
        row = torch.unique(raw[raw.isfinite() & (raw.abs() < 2.0**15)].float())
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
    return Proof(
        "enumeration of the real kernel", "every bf16 and fp16 value below 2^15 in one row", cases
    )


# ---- planted --------------------------------------------------------------------------------------------


def with_sum(sum_of: Callable[[Tensor], MaxSum]) -> Subject:
    """Another log-sum-exp; dx is the right one."""

    def function(x: Tensor, dim: int = -1) -> Tensor:
        right = log_softmax(x)
        if not x.numel():
            return right
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        total = sum_of(rows)
        wrong = ((rows - total.max) - log_positive(total.sum)).to(x.dtype).reshape(x.shape)
        return Replaced.apply(right, wrong)  # type: ignore[no-any-return, no-untyped-call]

    return function


over_the_batch, cut_by_threads, not_rescaled, without_the_tail = (
    with_sum(proofs.PLANTED[name])
    for name in ("over_the_batch", "cut_by_threads", "not_rescaled", "without_the_tail")
)


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """The right sum in another order where there are few rows."""
    return log_softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else log_softmax(x)


def log_of_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """log(softmax(x)), which is −inf where the softmax underflows."""
    return torch.log(torch.softmax(x, -1))


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """A row without an answer becomes zeros."""
    return log_softmax(x).nan_to_num(0.0)


def a_hair_more(x: Tensor, dim: int = -1) -> Tensor:
    """As an epsilon inside the logarithm gives."""
    return log_softmax(x) + 2.0**-15


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """A step the wrong way."""
    y = log_softmax(x)
    return torch.where((x > 1.0) & (x < 1.01), y - 0.5, y)


def plain_gradient(x: Tensor, dim: int = -1) -> Tensor:
    """dx added as stock adds it."""
    return Replaced.apply(stock(x), log_softmax(x.detach()))  # type: ignore[no-any-return, no-untyped-call]
