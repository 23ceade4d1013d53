"""Strict mode: the first call of each kind is watched, and a stock operator that carries an order is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isobit.adapters.coverage import Coverage, Observer, observe, walk_gradients
from isobit.adapters.operators import find_carrier
from isobit.errors import UnsupportedError

Output = TypeVar("Output")


class Strictness:
    """Which kinds of call of one model were watched already."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.watched: set[tuple[Any, ...]] = set()

    def run(self, model: nn.Module, kind: tuple[Any, ...], call: Callable[[], Output]) -> Output:
        """The call's output; of a new kind, only where every operator that carries an order was ours."""
        if not self.wanted or kind in self.watched:
            return call()
        with Placing(model) as seen:
            output = call()
        found = seen.coverage(walk_gradients([t for t in tensors_of(output) if t.grad_fn is not None]))
        if not found.kept:
            refuse(found, seen)
        self.watched.add(kind)
        return output


class Placing(Observer):  # type: ignore[no-untyped-call]
    """An observer that knows in which module an operator ran."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        self._model, self._inside, self._hooks = model, [""], ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> Placing:
        for name, module in self._model.named_modules():
            self._hooks.enter_context(within(module, name, self._enter, self._leave))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes where an operator that carries an order ran first."""
        if find_carrier(func, args, kwargs) is not None:
            self.places.setdefault(func._schema.name, self._inside[-1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _enter(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self._inside.append(name)

    def _leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._inside.pop()


@contextmanager
def within(module: nn.Module, name: str, enter: Callable[[str], None], leave: Callable[[], None]) -> Iterator[None]:
    """Tells when the module begins and ends, also where it ends by an exception."""
    before = module.register_forward_pre_hook(lambda *_: enter(name))
    after = module.register_forward_hook(lambda *_: leave(), always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def refuse(found: Coverage, seen: Placing) -> None:
    """Names the operator, the module and what to use."""
    if not found.carriers:
        raise UnsupportedError(
            expected="operators that run", received="none was seen", remedy="enable(model, strict=False) to go on"
        )
    first = next((use for use in found.carriers if use.operator in seen.places), found.carriers[0])
    place = seen.places.get(first.operator)
    where = f" in {place or type(seen._model).__name__}" if place is not None else " in the gradient's graph"
    more = f", and {len(found.carriers) - 1} more" if len(found.carriers) > 1 else ""
    raise UnsupportedError(
        expected="no stock operator that carries an order of its own",
        received=f"{first.operator}{where}: {first.reason}{more}",
        remedy=f"{first.remedy}; isobit.coverage(model, batch) lists all, enable(model, strict=False) goes on",
    )


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def coverage(model: nn.Module, batch: Mapping[str, Any]) -> Coverage:
    """Every operator that runs in a forward and backward of the model on this batch, enabled or not.

    The batch is what the model takes; labels are its input_ids where it has none. Gradients held before stay.
    """
    inputs = {"use_cache": False, **batch}
    inputs.setdefault("labels", inputs.get("input_ids"))
    held = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with torch.enable_grad(), observe() as seen:
            loss = model(**inputs).loss
            gradients = walk_gradients(loss)
            loss.backward()
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
    return seen.coverage(gradients)
