"""Run a model twice in eval mode and compare outputs; its state is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isobit import bits
from isobit.guards.live.module_replay import ModelCall, as_it_was, hooked_call
from isobit.guards.trial_run.report import NotJudged
from isobit.guards.trial_run.saved_files import readable_tensors

# A sample that others reach differs by far more than sums in another order do.
NEAR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
Answer = TypeVar("Answer")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Call the model's `eval`, and set every module's mode back at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def ask(
    model: nn.Module,
    run: Callable[[nn.Module, ModelCall, int], Answer],
    calls: list[tuple[ModelCall, int]],
) -> list[Answer]:
    """Run a model in eval mode, with calls and seeds.

    Raises:
        NotJudged: If it fails there.
    """
    try:
        with evaluating(model):
            return [run(model, call, seed) for call, seed in calls]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotJudged(f"the model fails in eval mode: {reason}") from error


def outputs_of(model: nn.Module, call: ModelCall, seed: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the digests of every module's outputs, in the order in which the modules end."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def after(name: str, module: nn.Module, output: Any) -> None:
        tensors = readable_tensors(output)
        found.append((name, tuple(bits.digest(tensor.detach().cpu()) for tensor in tensors)))

    with torch.no_grad(), as_it_was(model, call):
        torch.manual_seed(seed)
        hooked_call(model, call, lambda *_: None, after)
    return found


def tensors_of_call(model: nn.Module, call: ModelCall, seed: int | None) -> list[Tensor]:
    """Return the floating tensors of a model's output; without a seed, with the random numbers of the call."""
    with torch.no_grad(), as_it_was(model, call):
        if seed is not None:
            torch.manual_seed(seed)
        found = readable_tensors(model(*call.args, **call.kwargs))
        return [tensor for tensor in found if tensor.is_floating_point()]


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to what rounding explains at the largest element."""
    if not one.numel():
        return 0.0
    allowed = NEAR.get(one.dtype, 1e-3) * float(one.double().abs().max())
    apart = float((one.double() - other.double()).abs().nan_to_num(0.0).max())
    return apart / allowed if allowed else float(apart > 0)
