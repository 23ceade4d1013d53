"""Claims of log-softmax-kernel-v1: probabilities sum to 1, and dx is the portable executor's."""

from __future__ import annotations

from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.gradients import gradients
from isobit.library.log_softmax.proofs import bound_of
from isobit.library.subjects import Subject
from isobit.ops.log_softmax import portable


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
