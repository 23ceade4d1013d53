"""`distil`: the loss of an enabled student that learns from an enabled teacher, or from what a teacher stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.adapters import inner_model
from isobit.integrations.transformers.forwards import (
    kind_of,
    layout_of,
    refuse_tied_share,
    require_head,
    run_checked,
)
from isobit.integrations.transformers.layout import LAYOUT, Layout
from isobit.integrations.transformers.parts.lora import active_module
from isobit.integrations.transformers.state import State, require_state
from isobit.nn.linear import read_weight
from isobit.ops.arguments import cast_for_autocast
from isobit.ops.distillation.loss import Teacher, distillation_loss
from isobit.ops.linear.op import linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.op import check_temperature
from isobit.ops.logprob.portable import inverse
from isobit.parallel.tensor.shard import tp_group_of

ROWS_AT_ONCE = 256  # whose logits are in memory


class KnownWords(tuple[Tensor, Tensor]):
    """(ids, logprobs) of a teacher, which knows the temperature that they were computed at."""

    temperature: float

    def __new__(cls, words: tuple[Tensor, Tensor], temperature: float) -> KnownWords:
        """Keep the temperature with the words."""
        made = super().__new__(cls, words)
        made.temperature = temperature
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return what a copy is made of, as where a worker of a DataLoader sends it."""
        return tuple(self), self.temperature


def distil(
    student: nn.Module,
    teacher: nn.Module | Teacher,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    targets: Tensor | None = None,
    temperature: float = 1.0,
    alpha: float = 0.5,
    direction: str = "forward",
    beta: float = 0.5,
    num_items: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return isobit.distillation_loss of two models on the same tokens; the teacher runs without gradients.

    Args:
        student: An enabled causal language model, which is trained.
        teacher: An enabled causal language model with the same vocabulary, in eval mode; or logits [B, T, V]; or
            (ids, logprobs), both [B, T, n], as `most_likely` returns them at the same temperature.
        input_ids: Token ids, [B, T].
        attention_mask: As for isobit.logprobs.
        position_ids: As for isobit.logprobs.
        targets: The tokens of the cross-entropy, [B, T]; by default the token that follows in the same sample. The
            divergence too leaves out tokens whose target is -100.
        temperature: As for isobit.distillation_loss.
        alpha: As for isobit.distillation_loss.
        direction: As for isobit.distillation_loss.
        beta: As for isobit.distillation_loss.
        num_items: The number of targets of the *global* batch.
        reduction: As for isobit.distillation_loss.

    Returns:
        A scalar in fp32, or the losses of tokens [B, T].

    Raises:
        UnsupportedError: If a model is not enabled, its head is split over ranks or divides its logits, or the teacher
            is in training mode.
        ArgumentError: If the models have other vocabularies, or known words have another temperature.

    Example:
        >>> loss = distil(student, teacher, ids, mask, temperature=2.0)  # doctest: +SKIP
    """
    if isinstance(teacher, KnownWords) and teacher.temperature != temperature:
        raise ArgumentError(
            expected=f"the temperature of the teacher's words, {teacher.temperature}",
            received=f"temperature={temperature}",
            remedy=f"pass temperature={teacher.temperature}, or ask the teacher again at {temperature}",
        )
    known = teacher_states(teacher, input_ids, attention_mask, position_ids)
    model, state = prepared(student, "the student")
    layout = layout_of(input_ids, None, attention_mask, position_ids, None, {})
    wanted = layout.next_of(input_ids) if targets is None else targets

    def run() -> Tensor:
        hidden, weight = states_of(model, input_ids, attention_mask, position_ids, layout)
        refuse_tied_share(model)
        return distillation_loss(
            hidden,
            weight,
            known,
            wanted,
            temperature=temperature,
            alpha=alpha,
            direction=direction,
            beta=beta,
            num_items=num_items,
            reduction=reduction,
            samples=layout.samples,
        )

    kind = (*kind_of(model, layout, None, False), "distil", direction, alpha < 1)
    return run_checked(state, model, kind, run, calls_head=False, calls_model=False)


@torch.no_grad()
def most_likely(
    teacher: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    count: int,
    temperature: float = 1.0,
) -> KnownWords:
    """Return the `count` most likely next tokens of a teacher and their log-probabilities, both [B, T, count].

    Among equal ones the lower id comes first, so the bits of a token's entry do not depend on the batch.

    Args:
        teacher: An enabled causal language model in eval mode.
        input_ids: Token ids, [B, T].
        attention_mask: As for isobit.logprobs.
        position_ids: As for isobit.logprobs.
        count: How many words of each token.
        temperature: Divides the logits.

    Returns:
        Ids in int64 and log-probabilities in fp32.

    Raises:
        UnsupportedError: As `distil` does.
        ArgumentError: If the vocabulary has fewer words, or the temperature is not positive.
    """
    check_temperature(temperature)
    hidden, weight = teacher_states(teacher, input_ids, attention_mask, position_ids)
    if not 1 <= count <= len(weight):
        raise ArgumentError(
            expected=f"a count from 1 to {len(weight)}, the words of the teacher",
            received=f"{count}",
            remedy="ask for fewer words; the others count as one bucket",
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    ids, values = [], []
    for part in rows.split(ROWS_AT_ONCE):
        logits = linear_fp32(part, weight)
        scaled = logits if temperature == 1.0 else logits * inverse(temperature, logits.dtype)
        order = scaled.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        ids.append(order)
        values.append(log_softmax(scaled).gather(1, order))
    shape = (*input_ids.shape, count)
    words = torch.cat(ids).reshape(shape), torch.cat(values).reshape(shape)
    return KnownWords(words, temperature)


@torch.no_grad()
def teacher_states(
    teacher: nn.Module | Teacher,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
) -> Any:
    """Return (hidden, weight) of a model; anything else as it is."""
    if not isinstance(teacher, nn.Module):
        return teacher
    model, state = prepared(teacher, "the teacher")
    if model.training:
        raise UnsupportedError(
            expected="a teacher in eval mode",
            received=f"{type(model).__name__} in training mode",
            remedy="call teacher.eval()",
        )
    layout = layout_of(input_ids, None, attention_mask, position_ids, None, {})

    def run() -> tuple[Tensor, Tensor]:
        return states_of(model, input_ids, attention_mask, position_ids, layout)

    kind = (*kind_of(model, layout, None, False), "teacher")
    return run_checked(state, model, kind, run, calls_head=False, calls_model=False)


def prepared(model: nn.Module, name: str) -> tuple[Any, State]:
    """Return the causal model and its state, or raise."""
    causal: Any = inner_model(model)
    state = require_state(causal)
    if state.head is None or not state.head.is_language_model:
        raise ArgumentError(
            expected=f"{name} with a language-model head",
            received=type(causal).__name__,
            remedy="pass the model that has the language-model head",
        )
    head = require_head(state)
    scaled = head.divisor(causal) != 1.0 or head.softcap(causal) is not None
    if tp_group_of(causal.lm_head) is not None or scaled:
        raise UnsupportedError(
            expected=f"{name} with a whole head, whose logits are used as they are",
            received="a head that is split over ranks, or whose logits the model divides or caps",
            remedy="unshard the model; for divided logits call isobit.distillation_loss with hidden states",
        )
    return causal, state


def states_of(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    layout: Layout,
) -> tuple[Tensor, Tensor]:
    """Return the last hidden states and the weight of the head."""
    inputs: dict[str, Any] = {LAYOUT: layout, "use_cache": False, "return_dict": True}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    hidden = model.model(input_ids=input_ids, **inputs).last_hidden_state
    read = read_weight(active_module(model.lm_head))
    hidden, weight = cast_for_autocast(hidden, read.weight)
    return hidden, weight
