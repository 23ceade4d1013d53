"""One call of an operator, and what is kept of it when its tensors are gone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True)
class Call:
    """An operator and its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the operator."""
        return self.func(*self.args, **self.kwargs)


@dataclass(frozen=True)
class TensorSpec:
    """The shape, strides, dtype and device of a tensor that is not kept."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def empty(self) -> Tensor:
        """Allocate a tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


_FORMS: dict[Any, tuple[list[str], list[Any], int]] = {}


def form_of(func: Any) -> tuple[list[str], list[Any], int]:
    """Return the names and defaults of an operator's arguments, and how many may be given by position."""
    if func not in _FORMS:
        arguments = func._schema.arguments
        by_position = sum(not a.kwarg_only for a in arguments)
        defaults = [a.default_value if a.has_default_value() else None for a in arguments]
        _FORMS[func] = ([a.name for a in arguments], defaults, by_position)
    return _FORMS[func]


_WRITTEN: dict[Any, tuple[list[int], list[int]]] = {}


def written_by(func: Any) -> tuple[list[int], list[int]]:
    """Return which arguments an operator writes to, and which of these it does not return."""
    if func not in _WRITTEN:
        schema = func._schema
        returned = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
        found = [at for at, a in enumerate(schema.arguments) if is_written(a)]
        silent = [at for at in found if schema.arguments[at].alias_info.before_set not in returned]
        more = UNDECLARED.get(operator_name(func), [])
        _WRITTEN[func] = ([*found, *more], silent)
    return _WRITTEN[func]


def is_written(argument: Any) -> bool:
    """Return whether a schema says that an argument is written to."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


# Running statistics that operators write to although their schema does not say so.
UNDECLARED = {"aten::native_batch_norm": [3, 4], "aten::cudnn_batch_norm": [3, 4]}


def positions_of(arguments: list[int], flat: list[Any], spec: Any) -> list[int]:
    """Return the positions of arguments in the flat list."""
    if isinstance(spec, int) or not arguments:
        return arguments
    whole = _pytree.tree_unflatten(list(range(len(flat))), spec)
    return [leaf for at in arguments for leaf in _pytree.tree_leaves(whole[at])]


def results_of(func: Any, flat: list[Any], spec: Any, out: Any) -> list[Tensor]:
    """Return the tensors that a call returned, and after them those that it wrote to without returning them."""
    found = [out] if isinstance(out, Tensor) else tensors_of(out)
    silent = written_by(func)[1]
    if silent:
        given = [flat[at] for at in positions_of(silent, flat, spec)]
        found += [value for value in given if isinstance(value, Tensor)]
    return found


def flatten(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return all arguments in one list, defaults included, and how to put them together again.

    Two calls of one operator then have the same positions, whichever arguments were left out.
    """
    names, defaults, _ = form_of(func)
    whole = [
        *args,
        *(kwargs.get(n, d) for n, d in zip(names[len(args) :], defaults[len(args) :], strict=True)),
    ]
    if not any(isinstance(value, (list, tuple)) for value in whole):
        return whole, len(whole)
    return _pytree.tree_flatten(whole)


def unflatten(func: Any, flat: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undo `flatten`."""
    whole = flat if isinstance(spec, int) else _pytree.tree_unflatten(flat, spec)
    names, _, by_position = form_of(func)
    return tuple(whole[:by_position]), dict(
        zip(names[by_position:], whole[by_position:], strict=True)
    )


def describe(values: list[Any]) -> list[Any]:
    """Replace every tensor by its spec."""
    return [spec_of(value) if isinstance(value, Tensor) else value for value in values]


def spec_of(value: Tensor) -> TensorSpec:
    """Return the spec of a tensor."""
    return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


def rebuild(func: Any, flat: list[Any], spec: Any) -> Call:
    """Return a call like a past one, with fresh tensors of unset values."""
    made = [value.empty() if isinstance(value, TensorSpec) else value for value in flat]
    return Call(func, *unflatten(func, made, spec))


def shapes_of(flat: list[Any]) -> str:
    """Return the shapes of the tensors among arguments, as text."""
    found = [v for v in flat if isinstance(v, (Tensor, TensorSpec))]
    return " × ".join(str(list(v.shape)) for v in found)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in the result of an operator, in order."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def without_rows(values: Iterable[Any]) -> str:
    """Return what kind of tensor without strides is among values, such as "a sparse_coo tensor"; "" if none is.

    Sparse and nested tensors and those of a library of its own (mkldnn) have no rows that could be cut or compared.
    """
    for value in values:
        if isinstance(value, Tensor) and value.is_nested:
            return "a nested tensor"
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            name = str(value.layout).removeprefix("torch.").removeprefix("_")
            return f"{'an' if name[0] in 'aeiou' else 'a'} {name} tensor"
    return ""


def operator_name(func: Any) -> str:
    """Return the name of an operator without its overload, such as `aten::mm`."""
    name: str = func._schema.name
    return name
