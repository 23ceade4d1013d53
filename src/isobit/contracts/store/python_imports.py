"""Read which modules a Python source imports, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeGuard


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
