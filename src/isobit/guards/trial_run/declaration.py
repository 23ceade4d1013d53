"""What only the author of a program knows: a declaration with a closed set of keys, and its checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from isobit import bits
from isobit.errors import ArgumentError
from isobit.guards.live.module_replay import unwrapped
from isobit.guards.live.optimizer_checks import name_some, parameters_of
from isobit.guards.trial_run.hyperparameters import LIMIT_NAMES, NAMES, is_number
from isobit.guards.trial_run.observer import Observer
from isobit.guards.trial_run.report import Found, NotJudged
from isobit.guards.trial_run.saved_files import can_digest

KEYS = ("frozen", "tied", "hyperparameters", "global_batch_size")
HYPERPARAMETERS = ("betas", *LIMIT_NAMES, *(name for names in NAMES.values() for name in names))


@dataclass(frozen=True)
class Declaration:
    """What a program is declared to do.

    Attributes:
        frozen: Patterns, as of file names, of parameters that must not be trained.
        tied: Groups of names that must be one parameter.
        hyperparameters: Values that the optimizer must have.
        global_batch_size: Rows of a step, over all micro-batches and ranks.
    """

    frozen: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None


def refuse(received: str, remedy: str) -> ArgumentError:
    """Return the error of a declaration."""
    return ArgumentError(
        expected=f"a declaration with the keys {', '.join(KEYS)}", received=received, remedy=remedy
    )


def read_declaration(value: Mapping[str, Any]) -> Declaration:
    """Read a declaration.

    Args:
        value: The file as it was read.

    Raises:
        ArgumentError: If a key is not known, or a value is of another kind.
    """
    if not isinstance(value, Mapping) or not value:
        raise refuse(f"{type(value).__name__} without a key", "declare at least one thing")
    unknown = [str(key) for key in value if key not in KEYS]
    if unknown:
        raise refuse(f"unknown keys: {name_some(unknown)}", "remove them, or correct their names")
    frozen, tied = value.get("frozen", []), value.get("tied", [])
    if not is_list_of_names(frozen):
        raise refuse(f"frozen: {frozen!r}"[:120], "give a list of patterns, such as ['embed*']")
    if not isinstance(tied, list) or not all(is_list_of_names(g) and len(g) > 1 for g in tied):
        raise refuse(f"tied: {tied!r}"[:120], "give lists of two names or more")
    held = value.get("hyperparameters", {})
    wrong = (
        [str(k) for k in held if k not in HYPERPARAMETERS] if isinstance(held, Mapping) else [""]
    )
    wrong += [str(k) for k, v in ({} if wrong else held).items() if not is_value(k, v)]
    if wrong:
        raise refuse(
            f"hyperparameters: {name_some(wrong) or repr(held)}"[:120],
            f"give numbers for {', '.join(HYPERPARAMETERS)}",
        )
    size = value.get("global_batch_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise refuse(f"global_batch_size: {size!r}"[:120], "give a whole number above 0")
    return Declaration(tuple(frozen), tuple(map(tuple, tied)), dict(held), size)


def is_list_of_names(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) and each for each in value)


def is_value(name: str, value: Any) -> bool:
    """Return whether a value is a number, or two of `betas`."""
    if name == "betas":
        return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))
    return is_number(value)


def check_declaration(seen: Observer, declared: Declaration) -> Iterator[Found]:
    """Yield findings where frozen parameters are trained, or tied ones are several."""
    named: dict[str, Tensor] = {
        name: p
        for model, _ in seen.roots.values()
        for name, p in unwrapped(model).named_parameters(remove_duplicate=False)
    }
    if not named:
        raise NotJudged("no model with parameters was called in training mode")
    held = {id(p) for optimizer in seen.optimizers for p in parameters_of(optimizer)}
    for pattern in declared.frozen:
        matched = {name: p for name, p in named.items() if fnmatchcase(name, pattern)}
        wrong = [
            n for n, p in matched.items() if (p.requires_grad and id(p) in held) or moved(seen, p)
        ]
        if not matched:
            yield "not-frozen", "error", f"frozen: {pattern}: no parameter has such a name"
        elif wrong:
            yield (
                "not-frozen",
                "error",
                f"frozen: {pattern}: {len(wrong)} of {len(matched)} parameters are trained: {name_some(wrong)}",
            )
    for group in declared.tied:
        missing = [name for name in group if name not in named]
        if missing:
            yield "not-tied", "error", f"tied: no parameter is called {name_some(missing)}"
        elif len({id(named[name]) for name in group}) > 1:
            yield "not-tied", "error", f"tied: {', '.join(group)} are separate parameters"


def moved(seen: Observer, parameter: Tensor) -> bool:
    """Return whether the steps changed a parameter."""
    before = seen.before.get(id(parameter))
    return (
        before is not None and can_digest(parameter) and bits.digest(parameter.detach()) != before
    )
