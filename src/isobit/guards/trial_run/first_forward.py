"""Check a model that is evaluated before it is trained: the first training forward must not change the answer.

[Note: state that only training sets]
A training forward may change a model's buffers: running means follow the data. Some buffers depend on the weights only,
such as the vectors of a spectral norm. If these are first set by a training forward, an evaluation before it divides by
what they happened to be. So the evaluation is repeated after the first training forward, with the same weights. If it
answers differently, the training forward is repeated from the buffers of before with other data: a statistic of the
data then gives yet another answer, and what depends on the weights gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from isobit import bits
from isobit.guards.live.module_replay import Buffers, ModelCall, as_it_was, unwrapped
from isobit.guards.trial_run.asking import ask, difference, outputs_of, tensors_of_call
from isobit.guards.trial_run.report import Found, NotJudged
from isobit.guards.trial_run.saved_files import readable_tensors

LARGEST = 2**24  # elements of an answer that is kept


@dataclass
class Evaluation:
    """The first call of a model in eval mode, before any in training."""

    model: nn.Module
    call: ModelCall
    answer: list[Tensor]
    versions: list[int]
    buffers: Buffers | None = None


class FirstForward:
    """Evaluations that come before training, and what became of them."""

    def __init__(self) -> None:
        self.waiting: dict[int, Evaluation] = {}
        self.judged = 0
        self.found: list[Found] = []
        self.reason = "the program does not evaluate a model before it trains it"

    def note_evaluation(self, module: nn.Module, call: ModelCall, output: Any) -> None:
        """Keep the first answer of a model."""
        model = unwrapped(module)
        answer = [t.detach().clone() for t in readable_tensors(output) if t.is_floating_point()]
        if id(model) in self.waiting or not answer or sum(t.numel() for t in answer) > LARGEST:
            return
        self.waiting[id(model)] = Evaluation(model, call, answer, versions_of(model))

    def before_training(self, module: nn.Module) -> None:
        """Keep the buffers before the first training forward of a model that was evaluated."""
        seen = self.waiting.get(id(unwrapped(module)))
        if seen is not None and seen.buffers is None:
            seen.buffers = Buffers(seen.model)

    def after_training(self, module: nn.Module, call: ModelCall) -> None:
        """Evaluate again after the first training forward, with the call of that forward at hand."""
        seen = self.waiting.pop(id(unwrapped(module)), None)
        if seen is None or seen.buffers is None:
            return
        if seen.versions != versions_of(seen.model):
            self.reason = "weights were changed between the evaluation and the first training step"
            return
        try:
            self.found += judge(seen, call)
            self.judged += 1
        except NotJudged as reason:
            self.reason = str(reason)

    def check(self) -> Iterator[Found]:
        """Yield what was found.

        Raises:
            NotJudged: If no model was evaluated and then trained.
        """
        if not self.judged:
            raise NotJudged(self.reason)
        yield from self.found


def versions_of(model: nn.Module) -> list[int]:
    """Return how often each parameter was written to."""
    return [p._version for p in model.parameters()]


def judge(seen: Evaluation, trained: ModelCall) -> list[Found]:
    """Evaluate after the training forward, and after one with other data from the buffers of before."""
    model, before, after = seen.model, seen.buffers, Buffers(seen.model)
    assert before is not None
    (again,) = ask(model, tensors_at_call, [(seen.call, 0)])
    if not differ(seen.answer, again):
        return []
    try:
        before.put_back()
        (first,) = ask(model, outputs_of, [(seen.call, 0)])
        run_in_training(model, other_data(trained))
        (second,) = ask(model, outputs_of, [(seen.call, 0)])
        (other,) = ask(model, tensors_at_call, [(seen.call, 0)])
    finally:
        after.put_back()
    if len(other) != len(again) or not all(map(bits.equal, again, other)):
        return []  # a statistic of the data
    where = next((a[0] for a, b in zip(first, second, strict=False) if a != b), "") or "the model"
    apart = max(map(difference, seen.answer, again))
    return [
        (
            "eval-before-training",
            "error",
            f"the model was evaluated before its first training forward, which changes its answer (up to {apart:.3g} "
            f"times what rounding explains), whatever the data: {where} has state that only training sets",
        )
    ]


def tensors_at_call(model: nn.Module, call: ModelCall, seed: int) -> list[Tensor]:
    """Return the answer to a call, with the random numbers of that call."""
    return tensors_of_call(model, call, None)


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether answers differ by more than rounding explains."""
    return len(one) == len(other) and any(
        a.shape == b.shape and difference(a, b) > 1 for a, b in zip(one, other, strict=True)
    )


def run_in_training(model: nn.Module, call: ModelCall) -> None:
    """Run a training forward, and keep the buffers that it leaves."""
    try:
        with torch.no_grad(), as_it_was(model, call, keeps_buffers=True):
            model(*call.args, **call.kwargs)
    except Exception as error:
        raise NotJudged(f"the model fails with other data: {type(error).__name__}") from error


def other_data(call: ModelCall) -> ModelCall:
    """Return a call with other numbers of the same shapes: the first row in place of all, and other floats."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 1 or value.dtype == torch.bool:
            return value
        first = value[:1].expand_as(value).clone()
        return 2 * first + 1 if value.is_floating_point() else first

    return replace(call, args=tree_map(change, call.args), kwargs=tree_map(change, call.kwargs))
