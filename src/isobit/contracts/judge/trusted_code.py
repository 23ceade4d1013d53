"""Import the code that contracts name, only from packages that the caller trusts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from isobit.errors import ContractError, in_one_line
from isobit.foundation.trusted_folder import serve_folder

OURS = ("isobit",)
# Modules of isobit that run programs, serve folders or write files: contracts may not name them.
FORBIDDEN = (
    "cli",
    "contracts.judge.trusted_code",
    "contracts.pytest_items",
    "foundation.files",
    "foundation.native",
    "foundation.trusted_folder",
    "pytest_plugin",
    "simulator",
)


def check_trusted(reference: str, trusted: Sequence[str]) -> None:
    """Raise for code that is not trusted, before anything is imported."""
    module = reference.partition(":")[0]
    package = module.partition(".")[0]
    if package in OURS and f"{module}.".startswith(
        tuple(f"{package}.{part}." for part in FORBIDDEN)
    ):
        raise ContractError(
            expected="a kernel, or code that judges one",
            received=f"{reference}, which contracts may not name",
            remedy="name a function of your own package, and trust that package",
        )
    if package not in (*OURS, *trusted):
        raise ContractError(
            expected=f"code from a trusted package ({', '.join((*OURS, *trusted))})",
            received=reference,
            remedy=f"--trust {package}, if its import may run here (pytest: --isobit-trust)",
        )


def check_origin(found: Any, reference: str, trusted: Sequence[str]) -> None:
    """Raise for an object that a trusted module imports from a package that is not trusted."""
    origin = None
    if isinstance(found, ModuleType):
        origin = found.__name__
    elif inspect.isroutine(found) or inspect.isclass(found):
        origin = getattr(found, "__module__", None) or reference
    if origin is not None:
        check_trusted(f"{origin}:{reference.partition(':')[2]}", trusted)


def resolve(reference: str, trusted: Sequence[str]) -> Any:
    """Import the object that `package.module:name` names."""
    check_trusted(reference, trusted)
    serve_folder(trusted)  # here, so that processes of --jobs do it too
    module, _, path = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            if name.startswith("_"):
                raise AttributeError(f"{name} is private")
            # A method of an instance could change the judge.
            if not isinstance(found, (ModuleType, type)):
                raise AttributeError(f"{name} is of an instance; name a function of the module")
            found = getattr(found, name)
            check_origin(found, reference, trusted)
    except ContractError:
        raise
    except (Exception, SystemExit) as error:
        raise ContractError(
            expected=f"an existing object {reference}",
            received=f"{type(error).__name__}: {in_one_line(error)}",
            remedy="correct the name, or install what it needs",
        ) from None
    return found


def load_own(reference: str) -> Callable[..., Any]:
    """Import what judges compiled code.

    By name: the evidence of a contract without this relation must not depend on that code. `Contract.code` names it for
    the others.
    """
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
