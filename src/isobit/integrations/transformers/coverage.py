"""Record which operators ran, and which of them are not isobit's and add numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.integrations.transformers.autograd_graph import walk_gradients
from isobit.integrations.transformers.operator_table import Reason, Use, find_reason
from isobit.ops import dispatch

__all__ = ["Coverage", "Observer", "Use", "observe", "walk_gradients"]


@dataclass(frozen=True)
class Coverage:
    """The operators that ran, forward and backward, and the gradients that autograd adds."""

    operators: tuple[Use, ...]
    gradients: tuple[Use, ...] = ()

    @property
    def order_dependent(self) -> tuple[Use, ...]:
        """The operators that add in an order of their own, the most frequent first."""
        found = [use for use in (*self.operators, *self.gradients) if use.reason]
        return tuple(sorted(found, key=lambda use: (-use.count, use.operator)))

    @property
    def kept(self) -> bool:
        """True if operators ran and none of them adds in an order of its own."""
        return bool(self.operators) and not self.order_dependent

    def __str__(self) -> str:
        calls = sum(use.count for use in self.operators)
        seen = f"{len({use.operator for use in self.operators})} operators in {calls} calls"
        if not self.order_dependent:
            return f"{seen}: none carries an order of its own" if self.operators else "nothing ran"
        found = self.order_dependent
        return f"{seen}; {len(found)} carry an order of their own\n{table(found)}"


def table(uses: Sequence[Use]) -> str:
    """Format as aligned columns: operator, calls, reason, remedy."""
    rows = [("operator", "calls", "why", "instead")]
    rows += [(use.operator, str(use.count), use.reason, use.remedy) for use in uses]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:<{wide[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count every operator that torch dispatches while it is open: below autograd, composites decomposed.

    Operators called inside an operator, and inside compiled code, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: Counter[tuple[str, Reason | None]] = Counter()

    def __enter__(self) -> Observer:
        dispatch.has_native()  # kernels are attested by calls of operators, which are not the caller's
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decompose composite operators, which torch does not do under inference_mode."""
        named = kwargs or {}
        if func.namespace == "aten" and torch.is_inference_mode_enabled():
            with self:
                result = func.decompose(*args, **named)
            if result is not NotImplemented:
                return result
        self.note(func, args, named)
        return func(*args, **named)

    def note(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Count a call before it runs, because it may write to its arguments."""
        self._calls[func._schema.name, find_reason(func, args, named)] += 1

    def coverage(self, gradients: Iterable[Use] = ()) -> Coverage:
        """Return what was recorded until now, sorted by name."""
        uses = [
            Use(
                name,
                count,
                *(() if found_reason is None else (found_reason.reason, found_reason.remedy)),
            )
            for (name, found_reason), count in self._calls.items()
        ]
        return Coverage(
            tuple(sorted(uses, key=lambda use: (use.operator, use.reason))), tuple(gradients)
        )


def observe() -> Observer:
    """Return a recorder of operators; open it with `with`, then call its `coverage()`."""
    return Observer()
