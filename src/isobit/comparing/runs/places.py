"""Find the module and the source line that called an operator, from Python's frames."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from weakref import WeakKeyDictionary

import torch

from isobit.foundation import script_process

_CALL = torch.nn.Module._call_impl.__code__
_TORCH = str(Path(torch.__file__).parent) + "/"
_HERE = str(Path(__file__).parent) + "/"
_RUNNER = script_process.__file__  # which calls the script
_SIMULATOR = str(Path(__file__).parents[2] / "simulator") + "/"  # serves devices


class Places:
    """Names of modules by the outermost module that called them, and lines of the script."""

    def __init__(self, folder: str) -> None:
        """Show source files relative to the script's folder."""
        self.folder = folder.rstrip("/") + "/"
        self.names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self.roots: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()
        self.files: dict[CodeType, str | None] = {}

    def find(self) -> tuple[str, str]:
        """Return the path of the innermost module and the source line of the caller."""
        frame: FrameType | None = sys._getframe(1)
        module: torch.nn.Module | None = None
        source = ""
        while frame is not None:
            code = frame.f_code
            if not source:
                file = self.files.get(code, "")
                if file == "":
                    file = self.files[code] = self.shown(code.co_filename)
                if file:
                    source = f"{file}:{frame.f_lineno}"
            if code is _CALL:
                owner = frame.f_locals.get("self")
                if isinstance(owner, torch.nn.Module):
                    module = module or owner
                    if module in self.names and source:
                        break
                    outermost = owner
            frame = frame.f_back
        if module is None:
            return "", source
        if module not in self.names:
            self.add_root(outermost)
        return self.names.get(module, type(module).__name__), source

    def add_root(self, root: torch.nn.Module) -> None:
        """Name the modules inside an outermost module by their paths."""
        self.roots[root] = None
        for name, module in root.named_modules():
            self.names.setdefault(module, name or type(root).__name__)

    def shown(self, file: str) -> str | None:
        """Return a source file as it is shown; None for torch, this package and the interpreter."""
        if file.startswith((_TORCH, _HERE, _RUNNER, _SIMULATOR, "<frozen")):
            return None
        if file.startswith(self.folder):
            return file[len(self.folder) :]
        parts = file.split("/site-packages/")
        return parts[-1] if len(parts) > 1 else file

    def parameter_names(self) -> dict[int, str]:
        """Return the names of all parameters of the outermost modules, by identity."""
        found: dict[int, str] = {}
        for root in self.roots:
            for name, parameter in root.named_parameters(remove_duplicate=False):
                found.setdefault(id(parameter), name)
        return found
