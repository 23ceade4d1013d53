"""Questions that order certificates answer: a target, the shapes it is revealed at, and the order it must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isobit.contracts.judge.transforms import THREADS
from isobit.library.linear.orders import with_threads
from isobit.order.addition import Branch
from isobit.records import Proof
from isobit.reveal.certificate import certify
from isobit.reveal.targets.tensor_target import TensorTarget

Question = tuple[str, Callable[..., TensorTarget], Sequence[dict[str, int]], str]


def prove(questions: Sequence[Question], covers: str) -> Proof:
    """Every configuration has the defined order."""
    count = 0
    for what, target, shapes, expected in questions:

        def bound(
            threads: int, target: Callable[..., TensorTarget] = target, **shape: int
        ) -> TensorTarget:
            return with_threads(target(**shape), threads)

        found = certify(bound, [{**shape, "threads": t} for shape in shapes for t in THREADS])
        count += found.count
        if not found.matches(expected):
            return Proof("order certificate", "", count, f"{what}: {found}")
    return Proof(
        "order certificate", f"{covers}, {list(THREADS)} threads; all else is elementwise", count
    )


def pruned(branch: Branch, count: int) -> Branch | None:
    """The order of the first `count` terms alone."""
    if isinstance(branch, int):
        return branch if branch < count else None
    kept = tuple(b for b in (pruned(child, count) for child in branch) if b is not None)
    return kept if len(kept) > 1 else next(iter(kept), None)
