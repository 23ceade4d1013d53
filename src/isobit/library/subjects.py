"""Types and checks that the claims of all subjects share: calls that must raise, thread counts, replaced parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.errors import ArgumentError, IsobitError
from isobit.foundation.machine import thread_count

Subject = Callable[..., Tensor]  # the function that a contract judges
Predicate = Callable[[Any, Case, Tally], None]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # description, positional arguments, keywords


def on_one_thread(predicate: Predicate) -> Predicate:
    """Run a predicate on one thread; small calls are slower on two.

    Predicates that compare thread counts set them inside.
    """

    @wraps(predicate)
    def run(subject: Any, case: Case, tally: Tally) -> None:
        with thread_count(1):
            predicate(subject, case, tally)

    return run


def must_raise(
    call: Callable[[], object],
    what: str,
    tally: Tally,
    error: type[IsobitError] = ArgumentError,
) -> None:
    """Count one comparison: the call must raise `error`, with a remedy in its message."""
    tally.compared += 1
    try:
        call()
    except error as raised:
        if "remedy" not in str(raised):
            tally.fail(f"{what}: refused without a remedy")
    except Exception as other:
        tally.fail(f"{what}: {type(other).__name__} instead of {error.__name__}")
    else:
        tally.fail(f"{what}: accepted")


def refuses_each(function: Callable[..., object], calls: Iterable[Call], tally: Tally) -> None:
    """Count each call as a case: it must raise an ArgumentError with a remedy."""
    for what, given, named in calls:
        tally.count(1)
        must_raise(partial(function, *given, **named), what, tally)


@contextmanager
def replaced(home: Any, name: str, wrong: Any) -> Iterator[None]:
    """Replace one attribute of a module while the block runs."""
    right = getattr(home, name)
    setattr(home, name, wrong)
    try:
        yield
    finally:
        setattr(home, name, right)
