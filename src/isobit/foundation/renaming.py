"""Accept names of the last release for one more, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def accepts_old(**renamed: str) -> Callable[[Function], Function]:
    """Make a function accept keywords by their old names too.

    Args:
        renamed: old=new.

    Returns:
        A decorator. The function's signature shows the new names alone.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            for old, new in renamed.items():
                if old in named:
                    if new in named:
                        raise TypeError(
                            f"{function.__qualname__}() got {new}, and {old}, its old name"
                        )
                    warn_renamed(f"{old}=", f"{new}=", function.__qualname__)
                    named[new] = named.pop(old)
            return function(*args, **named)

        return cast(Function, call)

    return decorate


def keeps_old_attribute(old: str, new: str) -> Callable[[Class], Class]:
    """Make instances of a class have an attribute by its old name too."""

    def decorate(kind: Class) -> Class:
        def read(self: Any) -> Any:
            warn_renamed(f".{old}", f".{new}", kind.__name__)
            return getattr(self, new)

        setattr(kind, old, property(read, doc=f"The old name of `{new}`."))
        return kind

    return decorate


def warn_renamed(old: str, new: str, where: str, level: int = 3) -> None:
    """Warn the caller of the function that calls this one, or one further up."""
    warnings.warn(
        f"{old} of {where} is now {new}; the old name will be removed in the next release",
        DeprecationWarning,
        stacklevel=level,
    )
