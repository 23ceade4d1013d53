"""The loss of knowledge distillation: what a teacher may be, and the mean over the tokens of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.distillation.op import Described, divergence_and_logprob
from isobit.ops.distillation.portable import DIRECTIONS
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.linear.op import check_linear
from isobit.ops.logprob.loss import count_active, divisor, linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, check_targets, check_temperature
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import widen_rows
from isobit.order.samples import Samples

Teacher = Tensor | tuple[Tensor, Tensor]
ONE = 2.0**44  # probabilities are counted in parts of it


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    targets: Tensor | None,
    *,
    temperature: float = 1.0,
    alpha: float = 0.5,
    direction: str = "forward",
    beta: float = 0.5,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    samples: Samples | Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Loss of a student that learns from a teacher, from hidden states and the weights of both heads.

    Computes alpha · temperature² · KL + (1 − alpha) · cross-entropy without keeping logits. KL compares the two
    distributions at the temperature; the cross-entropy has temperature 1. KL is a sum of terms that cannot be negative,
    so it is 0 or more for every input, and exactly 0, with a gradient of exactly 0, where both models have the same
    bits. A token's loss depends on its own rows; the sum over tokens is exact, so it has no order.

    Args:
        hidden: The student's hidden states [..., K], in fp32, bf16 or fp16.
        weight: The weight of the student's head [V, K], in the dtype of hidden.
        teacher: A constant; it gets no gradient. It is (hidden, weight), the hidden states [..., J] and head [V, J] of
            the teacher, in a dtype of their own; or logits [..., V]; or (ids, logprobs), both [..., n]: the
            log-probabilities, at the same temperature, of some words, filled up with the id −1. All other words then
            count as one bucket.
        targets: Token ids of shape [...], int64 or int32; tokens with `ignore_index` do not count. None, where alpha
            is 1, counts every token.
        temperature: Divides the logits of both models in KL; positive.
        alpha: The weight of KL, from 0 to 1. With 0 this is isobit.linear_cross_entropy.
        direction: "forward", KL(teacher, student); "reverse", KL(student, teacher); or "jsd", which is
            beta · KL(teacher, m) + (1 − beta) · KL(student, m) with m = beta · teacher + (1 − beta) · student.
        beta: The weight of the teacher in "jsd", between 0 and 1.
        ignore_index: The target that means "no target".
        num_items: The number of targets of the *global* batch. By default that of the targets given, which is an error
            while a share of the batch is trained on.
        samples: The rows of each sample; see isobit.linear_logprob.
        reduction: "mean", or "none" for the loss of each token.

    Returns:
        A scalar in fp32, or a tensor [...] of the losses of tokens.

    Raises:
        ArgumentError: If shapes, dtypes, devices or vocabularies do not fit together, or there is no target.
        UnsupportedError: If num_items is missing inside isobit.parallel.Gradients.micro_batch.

    Example:
        >>> hidden, weight = torch.randn(4, 16), torch.randn(50, 16)
        >>> targets = torch.tensor([3, 49, -100, 0])
        >>> isobit.distillation_loss(hidden, weight, (hidden, weight), targets, temperature=2.0, alpha=1.0)
        tensor(0.)
        >>> large = torch.randn(4, 24), torch.randn(50, 24)
        >>> whole = isobit.distillation_loss(hidden, weight, large, targets, temperature=2.0)
        >>> turned = hidden.flip(0), weight, (large[0].flip(0), large[1]), targets.flip(0)
        >>> torch.equal(whole, isobit.distillation_loss(*turned, temperature=2.0))
        True
    """
    check_tensors(WITH_GPU, hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    check_temperature(temperature)
    check_choices(alpha, direction, beta, reduction)
    if targets is None:
        targets = all_tokens(hidden, alpha)
    check_targets(hidden, len(weight), torch.where(targets == ignore_index, IGNORED, targets))
    chosen, active = targets, 1.0
    if reduction == "mean":
        chosen, active = count_active(targets, ignore_index, num_items)
    elif ignore_index != IGNORED:
        chosen = targets.masked_fill(targets == ignore_index, IGNORED)
    described = describe_teacher(teacher, hidden, len(weight))
    if alpha == 0 and reduction == "mean":
        return linear_cross_entropy(hidden, weight, chosen, num_items=active, samples=samples)
    divergence, logprob = divergence_and_logprob(
        hidden, weight, described, chosen, temperature, direction, beta, samples
    )
    found = divergence * divisor(alpha * temperature * temperature, divergence)
    if alpha < 1:
        found = found + logprob * divisor(alpha - 1.0, logprob)
    if reduction == "none":
        return found.reshape(targets.shape)
    return exact_sum(found) / divisor(active, found)


def all_tokens(hidden: Tensor, alpha: float) -> Tensor:
    """Return targets that count every token and choose none in particular."""
    if alpha != 1:
        raise ArgumentError(
            expected="targets, of which the cross-entropy is a part of the loss",
            received=f"None, with alpha={alpha}",
            remedy="pass token ids, or alpha=1.0 for the divergence alone",
        )
    return torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)


def check_choices(alpha: float, direction: str, beta: float, reduction: str) -> None:
    """Raise unless the options are among those that are defined."""
    if not 0 <= alpha <= 1:
        raise ArgumentError(
            expected="alpha from 0 to 1", received=f"{alpha}", remedy="use 0.5 for equal parts"
        )
    if direction not in DIRECTIONS:
        raise ArgumentError(
            expected=f"a direction of {', '.join(DIRECTIONS)}",
            received=repr(direction),
            remedy="use 'forward' for KL(teacher, student)",
        )
    # At the ends m is one of the two, and the gradient's limit is another function.
    if direction == "jsd" and not 2.0**-20 <= beta <= 1 - 2.0**-20:
        raise ArgumentError(
            expected="beta between 0 and 1, at least 2^-20 from both",
            received=f"{beta}",
            remedy="use direction='forward' in place of beta=0, and 'reverse' in place of beta=1",
        )
    if reduction not in ("mean", "none"):
        raise ArgumentError(
            expected="a reduction of mean, none",
            received=repr(reduction),
            remedy="use 'none' and isobit.exact_sum for a sum",
        )


def describe_teacher(teacher: Teacher, hidden: Tensor, vocabulary: int) -> Described:
    """Return the teacher as the operator takes it, after checking that it fits to the student's rows and words."""
    rows = hidden.shape[:-1]
    check_place(teacher, hidden)
    if isinstance(teacher, Tensor):
        check_tensors(WITH_GPU, teacher=teacher)
        if teacher.shape != (*rows, vocabulary):
            refuse_vocabulary("teacher", teacher, (*rows, vocabulary))
        return teacher.detach().reshape(-1, vocabulary).contiguous(), None, None, None
    if not (
        isinstance(teacher, tuple | list)
        and len(teacher) == 2
        and all(isinstance(part, Tensor) for part in teacher)
    ):
        raise ArgumentError(
            expected="a teacher as (hidden, weight), as logits, or as (ids, logprobs)",
            received=type(teacher).__name__,
            remedy="pass the teacher's hidden states and the weight of its head as a tuple",
        )
    first, second = (part.detach() for part in teacher)
    if not first.is_floating_point():
        return describe_known_words(first, second, rows, vocabulary)
    check_tensors(WITH_GPU, teacher_hidden=first, teacher_weight=second)
    check_linear(first, second, None)
    if first.shape[:-1] != rows:
        expected = f"{[*rows, 'J']}, as the rows of hidden"
        refuse_shape("the teacher's hidden", first, expected, "pass the same tokens to both models")
    if len(second) != vocabulary:
        refuse_vocabulary("the teacher's weight", second, (vocabulary, second.shape[1]))
    return first.reshape(-1, first.shape[-1]), second, None, None


def check_place(teacher: Teacher, hidden: Tensor) -> None:
    """Raise where the models are on two devices, or one is in fp64, which is for gradcheck, and the other is not."""
    parts = teacher if isinstance(teacher, tuple | list) else (teacher,)
    for part in parts:
        if isinstance(part, Tensor) and part.device != hidden.device:
            raise ArgumentError(
                expected=f"a teacher on {hidden.device}, as the student",
                received=f"a teacher on {part.device}",
                remedy=f"move the teacher's tensors with .to({str(hidden.device)!r})",
            )
        real = isinstance(part, Tensor) and part.is_floating_point()
        if real and (part.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise ArgumentError(
                expected="both models in fp64, or neither",
                received=f"{hidden.dtype} and a teacher in {part.dtype}",
                remedy="convert the teacher with .to(torch.float32)",
            )


@keeping_subnormals
@torch.no_grad()
def describe_known_words(
    ids: Tensor, logprobs: Tensor, rows: torch.Size, vocabulary: int
) -> Described:
    """Return known words sorted by id, with the log of the probability that they leave to all others."""
    check_tensors(WITH_GPU, teacher_logprobs=logprobs)
    fits = ids.dtype in (torch.int64, torch.int32) and ids.shape == logprobs.shape
    if not fits or ids.shape[:-1] != rows or ids.dim() != len(rows) + 1 or not ids.shape[-1]:
        expected = f"{[*rows, 'n']}, n of 1 or more, int64 or int32, with log-probabilities of the same shape"
        refuse_shape("the teacher's ids", ids, expected, "pass one row of ids per row of hidden")
    flat = ids.reshape(-1, ids.shape[-1]).long()
    order = flat.argsort(dim=1, stable=True)
    flat, values = flat.gather(1, order), widen_rows(logprobs).gather(1, order)
    known = flat >= 0
    twice = (flat[:, 1:] == flat[:, :-1]) & known[:, 1:]
    if bool((flat < -1).any() | (flat >= vocabulary).any() | twice.any()):
        raise ArgumentError(
            expected=f"different ids from 0 to {vocabulary - 1} in a row of the teacher, or -1 to fill up",
            received="an id twice in a row" if bool(twice.any()) else f"{int(flat.max())}",
            remedy="check the tokenizer against the model's vocabulary",
        )
    values = torch.where(known, values, -torch.inf)
    # A sum of integers has no order: neither the listing of the words nor what fills up changes a bit.
    likely = exp_nonpositive(torch.where(values > 0, 0.0, values).double())
    total = (likely.nan_to_num() * ONE).round().long().sum(1)
    if bool((values > 0).any() | (total > ONE * (1 + 2.0**-10)).any() | values.isnan().any()):
        raise ArgumentError(
            expected="log-probabilities of the teacher: none above 0, and probabilities that sum to 1 or less",
            received=f"a largest of {float(values.max()):.6g} and a sum of {float(total.max()) / ONE:.6g}",
            remedy="pass log_softmax(logits / temperature) at the ids, not logits",
        )
    rest = (int(ONE) - total).clamp(min=0).to(values.dtype)
    log = log_positive(rest.clamp(min=1) / ONE)
    return values, None, flat, torch.where(rest > 0, log, -torch.inf)


def refuse_vocabulary(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise for a teacher of other words than the student's."""
    remedy = "use a teacher with the student's tokenizer; where only padding words differ, slice them off"
    refuse_shape(name, tensor, f"{list(expected)}, the words of the student", remedy)
