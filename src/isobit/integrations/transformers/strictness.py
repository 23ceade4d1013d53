"""Strict mode: watch the operators of new kinds of call, and raise if a stock operator added numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.foundation.machine import flushes_subnormals
from isobit.integrations.transformers.coverage import Coverage, Observer, observe, walk_gradients
from isobit.integrations.transformers.escapes import Escapes
from isobit.integrations.transformers.operator_table import find_reason
from isobit.integrations.transformers.refusals import refuse_flushing
from isobit.integrations.transformers.structure import is_hooked

Output = TypeVar("Output")


class Strictness:
    """The kinds of call of one model that were watched."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.watched: set[tuple[Any, ...]] = set()

    def forget(self) -> None:
        """Watch every kind again, because changed modules or hooks may run other operators."""
        self.watched.clear()

    def run(self, model: nn.Module, kind: tuple[Any, ...], call: Callable[[], Output]) -> Output:
        """Run a call; watch it if its kind is new, and raise if a stock operator added numbers."""
        if not self.wanted or kind in self.watched:
            return call()
        if flushes_subnormals(workers=True):
            refuse_flushing("threads of torch's pool that replace them by zero")
        seen = Placing(model)
        with seen, Escapes():
            output = call()
        # A gradient of before is added to the sum of this call's, not among them: it is not looked at.
        outputs = [t for t in tensors_of(output) if t.grad_fn is not None]
        graph = walk_gradients(outputs, held=False, known=unhooked_modules(model))
        found = seen.coverage(graph)
        if not found.kept:
            refuse(found, seen)
        self.watched.add(kind)
        return output


class Placing(Observer):  # type: ignore[no-untyped-call]
    """An observer that records in which module an operator ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}

    def note(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Record a call, and the module in which an operator that adds ran first."""
        name = func._schema.name
        if name not in self.places and find_reason(func, args, named) is not None:
            self.places[name] = self._running()
        super().note(func, args, named)

    def _running(self) -> str:
        """Return the innermost module that is being called, from the stack: hooks would affect other threads."""
        frame = inspect.currentframe()
        while frame is not None:
            if (
                frame.f_code.co_name == "_call_impl"
                and id(frame.f_locals.get("self")) in self._names
            ):
                return str(self._names[id(frame.f_locals["self"])])
            frame = frame.f_back
        return ""


def unhooked_modules(model: nn.Module) -> set[nn.Module]:
    """Return modules without hooks inside: recomputed in backward, they run what was watched in forward."""
    return {
        module
        for module in model.modules()
        if not any(is_hooked(part) for part in module.modules())
    }


def refuse(found: Coverage, seen: Placing) -> None:
    """Raise with the operator, the module and the remedy."""
    if not found.order_dependent:
        raise UnsupportedError(
            expected="operators that run",
            received="none was seen",
            remedy="enable(model, strict=False) to go on",
        )
    first = next(
        (use for use in found.order_dependent if use.operator in seen.places),
        found.order_dependent[0],
    )
    place = seen.places.get(first.operator)
    where = (
        f" in {place or type(seen._model).__name__}"
        if place is not None
        else " in the gradient's graph"
    )
    more = f", and {len(found.order_dependent) - 1} more" if len(found.order_dependent) > 1 else ""
    raise UnsupportedError(
        expected="no stock operator that carries an order of its own",
        received=f"{first.operator}{where}: {first.reason}{more}",
        remedy=f"{first.remedy}; isobit.coverage_report(model, batch) lists all, enable(model, strict=False) goes on",
    )


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def coverage_report(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any] | Tensor
) -> Coverage:
    """List every operator that runs in a forward and backward pass of a module, enabled or not.

    Args:
        model: A transformers model, or any module.
        batch: The module's keyword arguments, its positional arguments, or its one tensor. A transformers model is
            called with use_cache=False, and with its input_ids as labels if there are none.

    Returns:
        The operators, and what the autograd graph adds. Backward starts from the loss, or from a gradient of ones for
        each tensor of the output. Gradients that parameters hold are kept.

    Example:
        >>> print(isobit.coverage_report(torch.nn.Linear(4, 2), torch.ones(3, 4)).kept)
        False
        >>> print(isobit.coverage_report(isobit.nn.Linear(4, 2), torch.ones(3, 4)).kept)
        True
    """
    named = dict(batch) if isinstance(batch, Mapping) else {}
    placed = (
        ()
        if isinstance(batch, Mapping)
        else (batch,)
        if isinstance(batch, Tensor)
        else tuple(batch)
    )
    if hasattr(model, "config") and "input_ids" in named:
        named = {"use_cache": False, "labels": named["input_ids"], **named}
    with without_gradients(model), torch.enable_grad(), observe() as seen:
        output = model(*placed, **named)
        loss = getattr(output, "loss", None)
        found = [t for t in tensors_of(output if loss is None else loss) if t.grad_fn is not None]
        gradients = walk_gradients(found, known=unhooked_modules(model))
        if found:
            torch.autograd.backward(found, [torch.ones_like(t) for t in found])
    return seen.coverage(gradients)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Set gradients aside for the block, and put them back."""
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
