"""Load the public names of a package when they are first used.

The names are listed once, in the package's `__init__.pyi`: type checkers and documentation tools read that file, and so
does this module. `import isobit` and `isobit contract status` do not import torch.
"""

# Under `python -m isobit` the current folder is on the search path while this module is imported, so
# nothing is imported here that Python has not loaded at its start.
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def attach(
    package: str, file: str, renamed: "Mapping[str, str] | None" = None
) -> "tuple[Callable[[str], Any], Callable[[], list[str]], list[str], dict[str, str]]":
    """Return `__getattr__`, `__dir__`, `__all__` and {name: module} for a package that lists its names in a stub.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`; the stub is read from the same folder.
        renamed: {old name: new name} of the last release. They work, with a DeprecationWarning, and are not listed.
    """
    homes = read_stub(file + "i")

    def __getattr__(name: str) -> "Any":
        if renamed and name in renamed:
            import warnings

            warnings.warn(
                f"{package}.{name} is now {package}.{renamed[name]}; the old name will be removed in the next release",
                DeprecationWarning,
                stacklevel=2,
            )
            return __getattr__(renamed[name])
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return import_module(f"{package}.{name}")
        # A module that another thread still imports may have the name and not yet the operator's gradient, which it
        # registers last: import_module waits for that thread.
        module = sys.modules.get(home)
        if module is None or module.__spec__ is None or module.__spec__._initializing:  # type: ignore[attr-defined]
            module = import_module(home)
        if not hasattr(module, name):  # a module of another package
            return import_module(f"{home}.{name}")
        found = getattr(module, name)
        if home.startswith("isobit.ops.") and not module.__spec__._initializing:  # type: ignore[union-attr]
            # Operators are called by every layer: the next call finds it without this function.
            setattr(sys.modules[package], name, found)
        return found

    def __dir__() -> "list[str]":
        return sorted(homes)

    return __getattr__, __dir__, sorted(homes), homes


def read_stub(path: str) -> "dict[str, str]":
    """Read lines `from home import name as name` as {name: home}; other lines are for type checkers."""
    homes = {}
    with open(path, encoding="utf-8") as stub:
        for line in stub:
            words = line.split()
            if len(words) == 6 and words[0] == "from" and words[2] == "import":
                homes[words[3]] = words[1]
    return homes
