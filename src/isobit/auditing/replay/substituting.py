"""Run the audited run again with the variant's results put in the place of some operators' own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.replay.call import flatten, results_of
from isobit.auditing.replay.exactness import is_compared
from isobit.auditing.replay.merging import merge_parts
from isobit.auditing.replay.replay import Again


class Substituter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace the rows of the results of chosen calls by those of their replays."""

    def __init__(
        self,
        replays: dict[int, list[Again]],
        chosen: Collection[int],
        summed: Mapping[tuple[int, int], bool] | None = None,
    ) -> None:
        """Substitute calls.

        Args:
            replays: How each guilty call is made again.
            chosen: The numbers of the calls to substitute.
            summed: (call, result) of sums over samples, which are merged from one replay per sample, and whether by
                isobit's tree.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.replays, self.chosen, self.summed = replays, chosen, summed or {}
        self.calls = self.substituted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call, and its replays if it is chosen."""
        call = self.calls
        self.calls += 1
        if call not in self.chosen:
            return func(*args, **(kwargs or {}))
        flat, spec = flatten(func, args, kwargs or {})
        made = [(replay, replay.arguments(func, flat, spec)) for replay in self.replays[call]]
        out = func(*args, **(kwargs or {}))
        results = results_of(func, flat, spec, out)
        sums: dict[int, list[Tensor]] = {}
        for again, arguments in made:
            for at, value in enumerate(again.run(func, arguments, spec)):
                if at >= len(results) or not is_compared(func, results[at]):
                    continue
                if again.results[at] is None:
                    continue
                if again.results[at] or not self.sums_of(call, at):
                    again.substitute(at, results[at], value)
                else:
                    sums.setdefault(at, []).append(value)
        for at, parts in sums.items():
            results[at].copy_(merge_parts(parts, self.summed[call, at], results[at].dtype))
        self.substituted += 1
        return out

    def sums_of(self, call: int, at: int) -> bool:
        """Return whether a result is a sum over samples."""
        return (call, at) in self.summed
