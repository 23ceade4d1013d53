"""Keep the results of some calls of a run, and play them back in another run.

[Note: played back] A call that does not repeat gives other bits each time it is made again, so that no replay has the
variant's results. Two runs are kept instead: a first and a second one, with the results of the guilty calls. The first
run with the guilty results of the second played back must be the second run, bit for bit: then nothing but the guilty
calls made the two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.replay.call import flatten, operator_name, results_of

Kept = dict[
    int, tuple[str, list[Tensor]]
]  # by the number of the call: the operator and its results


class Keeper(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep copies of the results of chosen calls."""

    def __init__(self, chosen: Collection[int]) -> None:
        """Keep the results of these calls, by their numbers."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.chosen, self.calls = chosen, 0
        self.kept: Kept = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and copy its results if it is chosen."""
        call = self.calls
        self.calls += 1
        out = func(*args, **(kwargs or {}))
        if call in self.chosen:
            flat, spec = flatten(func, args, kwargs or {})
            results = [r.clone() for r in results_of(func, flat, spec, out)]
            self.kept[call] = (operator_name(func), results)
        return out


class Player(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put kept results in the place of the run's own."""

    def __init__(self, kept: Mapping[int, tuple[str, list[Tensor]]]) -> None:
        """Play these results back. A call that is another operator, or has other shapes, keeps its own."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.calls = kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and replace its results if they were kept."""
        operator, values = self.kept.get(self.calls, ("", []))
        self.calls += 1
        out = func(*args, **(kwargs or {}))
        if operator == operator_name(func):
            flat, spec = flatten(func, args, kwargs or {})
            for result, value in zip(results_of(func, flat, spec, out), values, strict=False):
                if result.shape == value.shape:
                    result.copy_(value)
        return out
