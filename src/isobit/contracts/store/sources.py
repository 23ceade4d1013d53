"""Find and hash the source of the code that contracts name, without importing it, and what it imports."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TypeGuard

from blake3 import blake3

from isobit.errors import ContractError
from isobit.foundation.trusted_folder import find_in_folder

# Read which modules a Python source imports, without importing it.


@lru_cache(maxsize=4096)  # a process that opens several folders of contracts reads most files again
def imports_of(text: bytes, name: str, is_package: bool) -> frozenset[str]:
    """Return every module that a file may import; `from a import b` may mean a.b."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    found: set[str] = set()
    modules: dict[str, str] = {}  # what a file calls them
    nodes = list(run_nodes(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    for node in nodes:  # `import a`, then `a.b`: b may be a lazily imported submodule
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            found.add(f"{modules[node.value.id]}.{node.attr}")
    return frozenset(found)


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that can run: not those under TYPE_CHECKING."""
    queue = [tree]
    while queue:
        node = queue.pop()
        yield node
        queue += node.orelse if is_for_checkers(node) else ast.iter_child_nodes(node)


def is_for_checkers(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether a node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def lazy_names(text: bytes) -> dict[str, str]:
    """Return {name: module} of the imports under TYPE_CHECKING in a package's `__init__.py`."""
    tree = parse_or_nothing(text)
    names: dict[str, str] = {}
    for block in filter(is_for_checkers, ast.walk(tree)):
        names |= imported_names(block)
    return names


def stub_names(text: bytes) -> dict[str, str]:
    """Return {name: module} of the imports in a package's stub."""
    return imported_names(parse_or_nothing(text))


def parse_or_nothing(text: bytes) -> ast.AST:
    """Parse Python, or return an empty module where it does not parse."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return {name: module} of every `from module import name` in a tree."""
    lines = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    return {alias.asname or alias.name: str(n.module) for n in lines for alias in n.names}


ROOT = Path(__file__).parents[2]  # isobit's own package
FLAGS = ("fma", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "amx_int8", "avx512_fp16")
# Variables that choose an executor or an instruction set inside torch and its libraries. Evidence for one setting is
# not evidence for another, so they are part of every digest. isobit itself is not configured by them.
INTERPRET = "TRITON_INTERPRET"
VARIABLES = (
    INTERPRET,
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "GLIBC_TUNABLES",
)
# Words in a source that may import code by name, without an import statement.
BY_NAME = re.compile(
    rb"import_module|__import__|importlib|runpy|pkgutil|sys\.modules|\bexec\b|\beval\b|getattr\(sys"
)


class Sources:
    """Digests of code by reference; each file is read once."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[str, frozenset[str]]] = {}
        self._closures: dict[tuple[str, str], str] = {}
        self._members: dict[tuple[str, str], frozenset[Path]] = {}
        self._lazies: dict[Path, dict[str, str]] = {}

    def digest_of(self, reference: str) -> str:
        """Return the digest of `package.module:name`: files outside site-packages, and versions of packages."""
        key = self._key(reference)
        if key not in self._closures:
            self._closures[key], self._members[key] = self._closure(*key)
        return self._closures[key]

    def files_of(self, reference: str) -> frozenset[Path]:
        """Return the files whose contents `digest_of` covers."""
        self.digest_of(reference)
        return self._members[self._key(reference)]

    def _key(self, reference: str) -> tuple[str, str]:
        module, _, name = reference.partition(":")
        return module, self._lazy(module).get(name.partition(".")[0], "")

    def _lazy(self, package: str) -> dict[str, str]:
        """Return {name: module} of what a package loads on first use, as it declares to type checkers.

        The declaration is an `if TYPE_CHECKING:` block of `__init__.py`, or a stub `__init__.pyi` beside it.
        """
        path = find_file(package)
        if path is None or path.name != "__init__.py":
            return {}
        if path not in self._lazies:
            stub = path.with_suffix(".pyi")
            declared = stub.read_bytes() if stub.is_file() else b""
            self._lazies[path] = lazy_names(path.read_bytes()) | stub_names(declared)
        return self._lazies[path]

    def _closure(self, module: str, home: str) -> tuple[str, frozenset[Path]]:
        package = module.partition(".")[0]
        if package != "isobit" and (version := installed_version(package)):
            return f"{package} {version}", frozenset()
        found: dict[str, str] = {}
        members: set[Path] = set()
        queue = [module, *[home] * bool(home)]
        while queue:
            name = queue.pop()
            path = find_file(name)
            if path is None:  # not a module: perhaps a name that its package imports lazily
                parent, _, last = name.rpartition(".")
                queue += [target] if (target := self._lazy(parent).get(last)) else []
            if name in found or path is None:
                continue
            found[name], imports = self._file(path, name)
            members.add(path)
            parent = name.rpartition(".")[0]
            queue += [parent] * bool(parent)
            for name in imports:
                top = name.partition(".")[0]
                if worked_on(top, package):
                    queue.append(name)
                elif top not in sys.stdlib_module_names and top not in found:
                    found[top] = f"version {installed_version(top)}"
        if module not in found:
            raise ContractError(
                expected=f"the source of {module}",
                received="none on the import path",
                remedy="correct the name",
            )
        return hash_text(
            *(f"{name} {digest}" for name, digest in sorted(found.items()))
        ), frozenset(members)

    def _file(self, path: Path, name: str) -> tuple[str, frozenset[str]]:
        if path not in self._read:
            text = path.read_bytes()
            self._read[path] = (
                blake3(text).hexdigest(),
                imports_of(text, name, path.name == "__init__.py"),
            )
        return self._read[path]


@lru_cache(maxsize=1000)
def find_package(package: str) -> ModuleSpec | None:
    """Find a package with every installed finder, else in the current folder; nothing is run."""
    try:
        return importlib.util.find_spec(package) or find_in_folder(package)
    except (ImportError, ValueError):
        return None


@lru_cache(maxsize=10_000)
def find_file(module: str) -> Path | None:
    """Find the source of a module on the import path; nothing is imported."""
    package, *rest = module.split(".")
    if package == "isobit":
        folders = [ROOT]
    else:
        spec = find_package(package)
        if spec is None:
            return None
        if not rest:
            return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
        # A namespace package may have several folders.
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        stem = folder.joinpath(*rest)
        names = (
            f"{stem.name}{suffix}" for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES)
        )
        for candidate in (stem / "__init__.py", *(stem.with_name(name) for name in names)):
            if candidate.is_file():
                return candidate
    return None


@lru_cache(maxsize=1000)
def worked_on(package: str, home: str) -> bool:
    """Return whether a package's source may change: the home package, or one that is not installed."""
    if package in ("isobit", home):
        return True
    if not package or package in sys.stdlib_module_names:
        return False
    spec = find_package(package)
    places = [] if spec is None else [str(spec.origin), *(spec.submodule_search_locations or ())]
    return bool(places) and not any("site-packages" in place for place in places)


@lru_cache(maxsize=1000)
def installed_version(package: str) -> str:
    """Return the version of an installed package; empty for code outside site-packages."""
    spec = find_package(package)
    if spec is None or "site-packages" not in str(spec.origin):
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # pip has another name for it (yaml, flint): hash its source.
        return blake3(Path(str(spec.origin)).read_bytes()).hexdigest()[:16]


@lru_cache(maxsize=16)
def executor_digest(machine: str) -> str:
    """Return the digest of the native library, torch's version and the machine's identity."""
    library = [blake3(path.read_bytes()).hexdigest() for path in sorted(ROOT.glob("_native.so"))]
    return hash_text(*library, f"torch {installed_version('torch')}", machine)


def machine(variables: Mapping[str, str] | None = None) -> str:
    """Return the machine's identity: processor features, and the variables that choose an engine."""
    chosen = engine_variables() if variables is None else variables
    return " ".join([_processor(), *(f"{name}={chosen[name]}" for name in sorted(chosen))])


@lru_cache(maxsize=1)
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    words: set[str] = set()
    if info.exists():
        line = next((row for row in info.read_text().splitlines() if row.startswith("flags")), "")
        words = set(line.split())
    return " ".join([platform.machine(), sys.platform, *(flag for flag in FLAGS if flag in words)])


def engine_variables() -> dict[str, str]:
    """Return those of VARIABLES that are set; Triton's only if it is 1, as Triton reads it."""
    found = {name: value for name in VARIABLES if (value := os.environ.get(name))}
    if found.get(INTERPRET) != "1":
        found.pop(INTERPRET, None)
    return found


def is_interpreted() -> bool:
    """Return whether Triton's interpreter is on: evidence of one executor is not evidence of another."""
    return INTERPRET in engine_variables()


def hash_text(*parts: str) -> str:
    """Return the BLAKE3 of several texts, each with its length."""
    hasher = blake3()
    for part in parts:
        data = part.encode()
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.hexdigest()
