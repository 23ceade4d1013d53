"""Built-in wrong subjects: a claim that does not catch the ones planted for it is void."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.trusted_code import load_own
from isobit.contracts.language.contract import LIBRARY_NAMES, PLANT
from isobit.foundation import native

Function = Callable[..., Any]


def primary(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """Return the first tensor of a call: most transforms change its rows."""
    return next(t for t in (*given, *named.values()) if isinstance(t, Tensor))


def flip(values: Tensor) -> Tensor:
    """Flip the last bit of each element: one unit in the last place."""
    return (bits.as_integers(values) ^ 1).view(values.dtype)


def nudged(when: Callable[[Tensor], Any]) -> Callable[[Function], Function]:
    """Plant an error of one ulp where `when` is true of the first tensor: a bool, or a mask of rows."""

    def plant(function: Function) -> Function:
        def wrong(*given: Any, **named: Any) -> Tensor:
            y = function(*given, **named).detach()
            mask = when(primary(given, named))
            if not isinstance(mask, Tensor):
                return flip(y) if mask else y
            mask = (
                mask.reshape(-1, *[1] * (y.dim() - 1))
                if mask.dim() == 1 and y.dim()
                else mask.any()
            )
            return torch.where(mask, flip(y), y)

        return wrong

    return plant


def last_row(x: Tensor) -> Tensor:
    at = torch.zeros(len(x), dtype=torch.bool)
    at[1:][-1:] = True  # a single row is right
    return at


def beside_a_positive(x: Tensor) -> Tensor:
    """Return a mask of rows that follow a row whose first element is positive."""
    before = x.reshape(len(x), -1)[:, :1].sum(-1).roll(1) > 0
    before[:1] = False
    return before


def is_moved(x: Tensor) -> bool:
    return not x.is_contiguous() or x.storage_offset() != 0


def replaced(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Function], Function]:
    """Plant a change of the output, given the first tensor."""

    def plant(function: Function) -> Function:
        def wrong(*given: Any, **named: Any) -> Tensor:
            return change(function(*given, **named).detach(), primary(given, named))

        return wrong

    return plant


def divided_wrongly(y: Tensor, x: Tensor) -> Tensor:
    size = y.shape[-1] if y.dim() else 1
    return y * (size / (size + 1))


def through_a_narrow_type(y: Tensor, x: Tensor) -> Tensor:
    """Drop mantissa bits, for every dtype."""
    mask = {2: ~0xF, 4: ~0xFFFFF, 8: ~0xFFFFFFFFFFFFF}[y.element_size()]
    return (bits.as_integers(y) & mask).view(y.dtype)


def without_the_tail(function: Function) -> Function:
    """Ignore the last element of each row."""

    def wrong(*given: Any, **named: Any) -> Any:
        x = primary(given, named)
        short = x.detach().clone()
        short[..., -1:] = 0
        given = tuple(short if t is x else t for t in given)
        return function(*given, **{k: short if t is x else t for k, t in named.items()})

    return wrong


def shifted_along_the_row(y: Tensor, x: Tensor) -> Tensor:
    """Move each value along its row, as swapped axes do in an output that is not square."""
    return (
        y.transpose(-1, -2).contiguous().reshape(y.shape)
        if y.dim() > 1 and min(y.shape) > 1
        else y.roll(1, -1) + 1
    )


def looks_like(y: Tensor, x: Tensor) -> Tensor:
    """Return the input itself where its shape fits."""
    return x.clone() if x.shape == y.shape else x.reshape(-1)[:1].expand(y.shape).clone()


def stale(function: Function) -> Function:
    """Cache results by the address of the input."""
    kept: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def wrong(*given: Any, **named: Any) -> Tensor:
        x = primary(given, named)
        key = x.data_ptr(), tuple(x.shape)
        if key not in kept:
            kept[key] = function(*given, **named).detach()
        return kept[key].clone()

    return wrong


def packed_once(function: Function) -> Function:
    """Cache a copy of the last tensor by its address, as packed weights are cached."""
    kept: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def wrong(*given: Any, **named: Any) -> Any:
        last = [t for t in (*given, *named.values()) if isinstance(t, Tensor)][-1]
        packed = kept.setdefault((last.data_ptr(), tuple(last.shape)), last.detach().clone())
        given = tuple(packed if t is last else t for t in given)
        return function(*given, **{k: packed if t is last else t for k, t in named.items()})

    return wrong


def careless(function: Function) -> Function:
    """Return something instead of raising."""

    def wrong(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception:
            return torch.zeros(1)

    return wrong


def never_called(function: Function) -> Function:
    """Return a result without launching the kernel."""
    return lambda *given, **named: torch.zeros_like(primary(given, named))


def of_one_size(function: Function) -> Function:
    """Pad everything to one size before the launch."""

    def wrong(*given: Any, **named: Any) -> Any:
        x = primary(given, named)
        room = torch.cat([x, x.new_zeros(4096 - len(x), *x.shape[1:])])
        given = tuple(room if t is x else t for t in given)
        return function(*given, **{k: room if t is x else t for k, t in named.items()})[: len(x)]

    return wrong


def loaded_each_time(function: Function) -> Function:
    """Load the binary of the kernels at every call."""

    def wrong(*given: Any, **named: Any) -> Any:
        native.load.__wrapped__()
        return function(*given, **named)

    return wrong


def in_training(plant: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Plant an error only if gradients are enabled and an input requires them."""

    def planted(function: Function) -> Function:
        def wrong(*given: Any, **named: Any) -> Any:
            trains = torch.is_grad_enabled() and any(
                t.requires_grad for t in given if isinstance(t, Tensor)
            )
            with torch.no_grad():  # the subject may not support gradients
                plain = tuple(t.detach() if isinstance(t, Tensor) else t for t in given)
                return (plant(function) if trains else function)(*plain, **named)

        return wrong

    return planted


def one_more_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Plant one more product in every configuration but the first."""
    planted: Callable[..., Any] = load_own(PLANT)(function)
    return planted


LIBRARY: dict[str, Callable[[Function], Function]] = {
    "order by batch": nudged(lambda x: len(x) > 16),
    "last row off by one ulp": nudged(last_row),
    "leak from the row before": nudged(beside_a_positive),
    "other kernel for other storage": nudged(is_moved),
    "sum shared among threads": nudged(lambda x: torch.get_num_threads() > 1),
    "other kernel for more axes": nudged(lambda x: x.dim() > 2),
    "one ulp off": nudged(lambda x: True),
    "stale cache": stale,
    "stale weights": packed_once,
    "constant output": replaced(lambda y, x: torch.zeros_like(y)),
    "identity": replaced(looks_like),
    "wrong divisor": replaced(divided_wrongly),
    "narrow accumulator": replaced(through_a_narrow_type),
    "axes swapped": replaced(shifted_along_the_row),
    "off by one at the tail": without_the_tail,
    "negated": replaced(lambda y, x: -y - 1),
    "three times too large": replaced(lambda y, x: 3 * y + 1),
    "accepts everything": careless,
    "never launched": never_called,
    "made for one size": of_one_size,
    "loaded at each call": loaded_each_time,
    "one more product elsewhere": one_more_product,
    "order by batch with gradients": in_training(nudged(lambda x: len(x) > 16)),
    "constant output with gradients": in_training(replaced(lambda y, x: torch.zeros_like(y))),
}

assert tuple(LIBRARY) == LIBRARY_NAMES
