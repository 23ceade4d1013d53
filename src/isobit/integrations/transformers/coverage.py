"""Which operators really ran, and which of them carry an order of addition of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.integrations.transformers.autograd_graph import walk_gradients
from isobit.integrations.transformers.operator_table import Carrier, Use, find_carrier
from isobit.ops import dispatch

__all__ = ["Coverage", "Observer", "Use", "observe", "walk_gradients"]


@dataclass(frozen=True)
class Coverage:
    """What ran, forward and backward, and where gradients meet."""

    operators: tuple[Use, ...]
    gradients: tuple[Use, ...] = ()

    @property
    def carriers(self) -> tuple[Use, ...]:
        """Those with an order of their own; the most frequent first."""
        found = [use for use in (*self.operators, *self.gradients) if use.reason]
        return tuple(sorted(found, key=lambda use: (-use.count, use.operator)))

    @property
    def kept(self) -> bool:
        """Something ran, and none of it carries an order of its own."""
        return bool(self.operators) and not self.carriers

    def __str__(self) -> str:
        calls = sum(use.count for use in self.operators)
        seen = f"{len({use.operator for use in self.operators})} operators in {calls} calls"
        if not self.carriers:
            return f"{seen}: none carries an order of its own" if self.operators else "nothing ran"
        return f"{seen}; {len(self.carriers)} carry an order of their own\n{table(self.carriers)}"


def table(uses: Sequence[Use]) -> str:
    """Aligned columns: operator, calls, why, instead."""
    rows = [("operator", "calls", "why", "instead")]
    rows += [(use.operator, str(use.count), use.reason, use.remedy) for use in uses]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:<{wide[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator called while it is open, as torch carries them out: below autograd, composites taken apart.

    Operators called inside an operator, and inside compiled code, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[tuple[str, Carrier | None]] = Counter()

    def __enter__(self) -> Observer:
        dispatch.has_native()  # kernels are attested by calls of operators, which are not the caller's
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Under inference_mode torch does not take composites apart before it calls a mode: done here."""
        named = kwargs or {}
        if func.namespace == "aten" and torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        self.note(func, args, named)
        return func(*args, **named)

    def note(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Count a call, before it is made, since it may write to its arguments."""
        self._calls[func._schema.name, find_carrier(func, args, named)] += 1

    def coverage(self, gradients: Iterable[Use] = ()) -> Coverage:
        """What was seen until now, by name."""
        uses = [
            Use(name, count, *(() if carrier is None else (carrier.reason, carrier.remedy)))
            for (name, carrier), count in self._calls.items()
        ]
        return Coverage(
            tuple(sorted(uses, key=lambda use: (use.operator, use.reason))), tuple(gradients)
        )


def observe() -> Observer:
    """`with observe() as seen: …`, then `seen.coverage()`."""
    return Observer()
