"""Check a model as a function: the same twice, a sample alone as among others, as many rows out as in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from isobit import bits
from isobit.guards.live.module_replay import ModelCall, tensors_in, unwrapped
from isobit.guards.trial_run.asking import ask, difference, outputs_of, tensors_of_call
from isobit.guards.trial_run.observer import Observer, batch_axis
from isobit.guards.trial_run.report import Found, NotJudged


def evaluation_is_a_function(seen: Observer) -> Iterator[Found]:
    """Check that a model in eval mode gives the same bits twice, with other random numbers."""
    for inner, call in models_of(seen):
        first, second = ask(inner, outputs_of, [(call, 1), (call, 2)])
        if not any(digests for _, digests in first):
            raise NotJudged("no module returns a tensor whose bits can be read")
        wrong = next((a[0] for a, b in zip(first, second, strict=False) if a != b), None)
        if wrong is not None or len(first) != len(second):
            yield (
                "eval-is-random",
                "error",
                "in eval mode the same input gives other bits the second time, first in "
                f"{wrong or 'the model'} ({type(inner.get_submodule(wrong or '')).__name__}): "
                "dropout that ignores the mode, or another random number",
            )


def models_of(seen: Observer) -> list[tuple[nn.Module, ModelCall]]:
    """Return the models of a run, without wrappers, and a call of each."""
    if not seen.roots:
        raise NotJudged("no model was called in training mode")
    return [(unwrapped(model), call) for model, call in seen.roots.values()]


def rows_of(model: nn.Module, value: Any) -> int:
    """Return the number of samples of inputs.

    Raises:
        NotJudged: If tensors do not have one number, or it is below 2.
    """
    axis = batch_axis(model)
    sizes = {tensor.shape[axis] for tensor in tensors_in(value) if tensor.ndim > axis}
    if len(sizes) != 1 or min(sizes) < 2:
        raise NotJudged(f"inputs have {sorted(sizes)} samples, not one number above 1")
    return min(sizes)


def eval_output_is_batch_independent(seen: Observer) -> Iterator[Found]:
    """Check that in eval mode the output for one sample does not depend on the others of its batch."""
    for inner, call in models_of(seen):
        rows, axis = rows_of(inner, (call.args, call.kwargs)), batch_axis(inner)
        last = rows - 1

        def pick(value: Any, axis: int = axis, last: int = last) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= axis:
                return value
            return value.index_select(axis, torch.tensor([last, last], device=value.device))

        # Twice, as a batch of one is a special case of many kernels, and an error in a batch norm.
        alone = replace(call, args=tree_map(pick, call.args), kwargs=tree_map(pick, call.kwargs))
        together, again, single = ask(inner, tensors_of_call, [(call, 1), (call, 2), (alone, 1)])
        if not all(map(bits.equal, together, again)):
            raise NotJudged("the model is random in eval mode")
        pairs = [
            (pick(one), other)
            for one, other in zip(together, single, strict=False)
            if one.ndim > axis and one.shape[axis] == rows and pick(one).shape == other.shape
        ]
        if not pairs:
            raise NotJudged("the model has no output with a row per sample")
        apart = max(difference(one, other) for one, other in pairs)
        if apart > 1:
            yield (
                "eval-depends-on-others",
                "error",
                f"in eval mode, sample {last} of {rows}, with only a copy of itself, gives another output (up to "
                f"{apart:.3g} times what rounding explains): a norm over the batch that ignores the mode, or a model "
                "that mixes samples",
            )


def as_many_rows_out_as_in(seen: Observer) -> Iterator[Found]:
    """Check that outputs have a row per sample, and that losses compare tensors of one shape."""
    judged = 0
    for model, given, returned in seen.shapes.values():
        axis = batch_axis(model)
        rows = {shape[axis] for shape in given if len(shape) > max(axis, 1)}
        if len(rows) != 1 or min(rows) < 2 or returned is None or len(returned) < 2:
            continue
        judged += 1
        (count,) = rows
        kept = returned[axis : axis + 1] == (count,) or returned[1:-1] == (count,)
        if not kept and returned[0] < count:  # tokens may be flattened, and boxes be many
            yield (
                "rows-lost",
                "warning",
                f"{type(model).__name__} was called with {count} rows and returned the shape {list(returned)}",
            )
    for call in seen.losses.calls:
        if call.shapes is None:
            continue
        judged += 1
        if call.shapes[0] != call.shapes[1] and 1 not in (shape.numel() for shape in call.shapes):
            one, two = (list(shape) for shape in call.shapes)
            yield (
                "loss-broadcasts",
                "error",
                f"{call.kind} compares predictions {one} with targets {two}: every one with every other",
            )
            break
    if not judged:
        raise NotJudged("no model took and returned rows of tensors, and no loss compared elements")
