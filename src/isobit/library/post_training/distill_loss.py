"""Claims of distill-loss-v1: `distil(hidden, weight, known, head, micro)`, one step, and planted wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.ops.distillation.loss import distillation_loss
from isobit.ops.linear.op import linear_fp32
from isobit.order.samples import Samples
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradients import Gradients

SAMPLES, TOKENS = 8, 4  # of the step of a distillation
OPTIONS: dict[str, Any] = {"temperature": 2.0, "alpha": 0.7}
Step = Callable[..., tuple[Tensor, Tensor]]


class Head(torch.nn.Module):
    """A student of one layer, its head."""

    def __init__(self, weight: Tensor) -> None:
        """Start from a weight [V, K]."""
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().clone())


@torch.enable_grad()
def distil(
    hidden: Tensor,
    weight: Tensor,
    known: Tensor,
    head: Tensor,
    micro: int = 1,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens, and the gradient of the student's head, of one step in micro-batches."""
    hidden, known = whole_step(hidden), whole_step(known)
    model = Head(weight)
    gradients = Gradients(model, GlobalBatch(SAMPLES, micro_batches=micro))
    losses = []
    for index in range(micro):
        rows = slice(index * len(hidden) // micro, (index + 1) * len(hidden) // micro)
        teacher = linear_fp32(known[rows], head) if stored else (known[rows], head)
        with gradients.micro_batch(index) as share:
            lengths = [TOKENS] * (SAMPLES // micro)
            samples = Samples.packed(lengths, first=share.first, total=share.total)
            given = hidden[rows], model.weight, teacher, targets_of(hidden, len(weight))[rows]
            each = distillation_loss(*given, reduction="none", samples=samples, **OPTIONS)
            torch.autograd.backward(each.sum() / len(hidden))
        losses.append(each.detach())
    assert model.weight.grad is not None
    return torch.cat(losses), model.weight.grad


def whole_step(rows: Tensor) -> Tensor:
    """Return the tokens of all samples; rows are repeated or left out until there are as many."""
    return rows[torch.arange(SAMPLES * TOKENS) % len(rows)]


def targets_of(hidden: Tensor, words: int) -> Tensor:
    """Return a target for each token."""
    return torch.arange(len(hidden)) % words


def one_step(subject: Step, case: Case, tally: Tally) -> None:
    """A step has the same losses and gradient in 1, 2, 4 and 8 micro-batches, from a live and a stored teacher."""
    given = tuple(case.arguments.values())
    tally.count(case.rows)
    wanted = subject(*given, micro=1)
    tally.true((wanted[0] >= 0).reshape(-1), "losses are not negative", wanted[0])
    for micro, stored in product((1, 2, 4, 8), (False, True)):
        found = subject(*given, micro=micro, stored=stored)
        where = f"{micro} micro-batches, {'stored' if stored else 'live'} teacher"
        for one, other, name in zip(found, wanted, ("losses", "gradient"), strict=True):
            tally.same(one, other, f"{name}, {where}")


def mean_of_means(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Divide by the micro-batch's own number of tokens."""
    hidden, weight, known, head = given
    losses, grad = distil(hidden, weight, known, head, micro, stored)
    return losses, grad * micro


def teacher_in_bf16(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Store the teacher's logits in 16 bits."""
    hidden, weight, known, head = given
    if stored:
        return distil(hidden, weight, known.bfloat16().to(known.dtype), head, micro, stored)
    return distil(hidden, weight, known, head, micro)


@torch.enable_grad()
def stock_distil(*given: Tensor, micro: int = 1, stored: bool = False) -> tuple[Tensor, Tensor]:
    """Distil by F.kl_div and autograd's accumulation."""
    weight, head = given[1], given[3]
    hidden, known = whole_step(given[0]), whole_step(given[2])
    leaf = weight.detach().clone().requires_grad_()
    losses = []
    for index in range(micro):
        rows = slice(index * len(hidden) // micro, (index + 1) * len(hidden) // micro)
        student, teacher = F.linear(hidden[rows], leaf), F.linear(known[rows], head)
        q, p = (F.log_softmax(x.float() / OPTIONS["temperature"], -1) for x in (student, teacher))
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        chosen = targets_of(hidden, len(weight))[rows]
        plain = F.cross_entropy(student.float(), chosen, reduction="none")
        square = OPTIONS["temperature"] ** 2
        each = OPTIONS["alpha"] * square * kl + (1 - OPTIONS["alpha"]) * plain
        torch.autograd.backward(each.sum() / len(hidden))
        losses.append(each.detach())
    assert leaf.grad is not None
    return torch.cat(losses), leaf.grad
