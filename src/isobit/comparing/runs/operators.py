"""What an operator's schema says: whether it only makes a view, leaves memory unwritten, writes arguments, or draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Operators whose result has no defined contents.
UNWRITTEN = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "_efficientzerotensor",
}
# Operators that write their first argument without reading it.
OVERWRITE = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}


@dataclass(frozen=True)
class Operator:
    """The facts about one operator.

    Attributes:
        name: such as `aten::mm`.
        view: whether it only returns a view of its argument.
        unwritten: whether its result has no defined contents.
        overwrites: whether it writes its first argument without reading it.
        written: indices and names of the arguments that it writes.
        draws: whether it draws random numbers.
    """

    name: str
    view: bool
    unwritten: bool
    overwrites: bool
    written: tuple[tuple[int, str], ...]
    draws: bool


def read_operator(function: Any) -> Operator:
    """Read the facts from an operator's schema."""
    schema = function._schema
    short = schema.name.partition("::")[2]
    written = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Operator(
        schema.name,
        aliased and not written,
        short in UNWRITTEN,
        short in OVERWRITE,
        written,
        torch.Tag.nondeterministic_seeded in function.tags,
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the plain tensors with elements in arguments or results."""
    if isinstance(value, torch.Tensor):
        if (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout is torch.strided
            and not value.is_meta
        ):
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def numbers_in(values: Any) -> str:
    """Return the Python numbers and texts among arguments as text."""
    found: list[str] = []
    for value in values:
        if isinstance(value, bool | int | float | complex | str):
            found.append(repr(value))
        elif isinstance(value, list | tuple) and not any(
            isinstance(v, torch.Tensor) for v in value
        ):
            found.append(repr(value)[:200])
    return ", ".join(found)


def generator_state(keywords: dict[str, Any], values: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the state of the generator that a drawing operator uses; None off the CPU without a generator."""
    for value in (*keywords.values(), *values):
        if isinstance(value, torch.Generator):
            return value.get_state()
    for tensor in tensors_in([*values, *keywords.values()]):
        if tensor.is_cuda:
            return torch.cuda.get_rng_state(tensor.device)
    return torch.get_rng_state()
