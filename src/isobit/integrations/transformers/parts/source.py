"""The source of a forward: its digest without names and notes, and which linear layers share an input in it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.parts.part import plain_type

# Decorators of transformers and torch that wrap a forward without changing what it computes.
NEUTRAL = frozenset(
    [
        "torch.no_grad()",
        "no_grad()",
        "dynamic_rope_update",
        "auto_docstring",
        "can_return_tuple",
        "capture_outputs",
        "merge_with_config_defaults",
        "check_model_inputs",
        "staticmethod",
    ]
)
CALLS_OF_NEUTRAL = ("auto_docstring(", "deprecate_kwarg(", "use_kernel", "capture_outputs(")
# What the last part of a class's name may be; what comes before it is the name of its model.
ENDINGS = [
    "RMSNorm",
    "LayerNorm",
    "MLP",
    "Attention",
    "DecoderLayer",
    "RotaryEmbedding",
    "TextScaledWordEmbedding",
    "TextModel",
    "Model",
    "ForCausalLM",
]
# Functions that a composite names and that are re-bound, or never called where isobit's attention is registered.
REPLACED = ("apply_rotary", "eager_attention_forward")


def function_of(kind: type) -> Any:
    """Return the function under a class's forward, or raise if others wrapped or replaced it."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    found = kind.forward  # type: ignore[attr-defined]
    while True:
        home = getattr(found, "__globals__", {}).get("__name__", "")
        known = home == owner.__module__ or home.partition(".")[0] in ("transformers", "torch")
        if not known or (home != owner.__module__ and not hasattr(found, "__wrapped__")):
            raise UnsupportedError(
                expected=f"{kind.__name__}.forward as {owner.__module__} defines it",
                received=f"one of {home or type(found).__name__}",
                remedy="do not patch the classes of torch or transformers where isobit computes them",
            )
        if not hasattr(found, "__wrapped__"):
            return found
        found = found.__wrapped__


@lru_cache(maxsize=4096)
def tree_of(function: Any) -> ast.FunctionDef:
    """Return the parsed source of a function, without annotations, docstrings and neutral decorators."""
    try:
        parsed = parse(function)
    except (OSError, TypeError, SyntaxError) as error:
        raise UnsupportedError(
            expected=f"the source of {getattr(function, '__qualname__', function)}",
            received=f"none that can be read: {error}",
            remedy="define the class in a file, or register it: isobit.parts.register(cls, …)",
        ) from error
    if not isinstance(parsed, ast.FunctionDef):
        raise UnsupportedError(
            expected=f"a function defined by `def` for {getattr(function, '__qualname__', function)}",
            received=type(parsed).__name__,
            remedy="define forward as a method of the class",
        )
    for node in walk(parsed):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if not is_neutral(d)]
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.arg):
            node.annotation = None
    return parsed


def parse(function: Any) -> ast.stmt:
    """Return the parsed source of a function as it is written."""
    try:
        return ast.parse(textwrap.dedent("".join(block_of(function)))).body[0]
    except (SyntaxError, IndexError):  # as a string with lines that are indented less
        return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def block_of(function: Any) -> list[str]:
    """Return the lines of a function by indentation; `inspect.getsource` reads every token, which takes longer."""
    lines, first = inspect.findsource(inspect.unwrap(function))
    indent, is_body = len(lines[first]) - len(lines[first].lstrip()), False
    for at, line in enumerate(lines[first:], first):
        text = line.lstrip()
        if not text or text.startswith(("#", ")", "]", "}")) or len(line) - len(text) > indent:
            continue
        if is_body:
            return lines[first:at]
        is_body = text.startswith(("def ", "async "))  # the lines before it are decorators
    return lines[first:]


@lru_cache(maxsize=4096)
def nodes_of(function: Any) -> tuple[ast.AST, ...]:
    """Return all nodes of a function's source, without contexts (ast.Load, ast.Store)."""
    return tuple(walk(tree_of(function)))


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree, as `ast.walk` does; a survey of all types visits a million, so it is written out."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return found


def is_neutral(decorator: ast.expr) -> bool:
    """Return whether a decorator leaves what is computed as it is."""
    text = ast.unparse(decorator)
    return text in NEUTRAL or text.startswith(CALLS_OF_NEUTRAL)


def write(node: Any, prefix: str) -> str:
    """Write a tree as text that does not depend on the version of Python; `prefix` is the name of the model."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return write(ast.Assign(targets=[node.target], value=node.value), prefix)
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={write(value, prefix)}"
            for name, value in ast.iter_fields(node)
            if value not in (None, []) and name not in ("ctx", "type_comment", "kind", "lineno")
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(write(one, prefix) for one in node)}]"
    return repr(node.replace(prefix, "X") if isinstance(node, str) and prefix else node)


def called_functions(kind: type | None, function: Any) -> Iterator[Any]:
    """Yield the methods and the functions of the same file that a function calls."""
    for node in nodes_of(function):
        if not isinstance(node, ast.Call):
            continue
        name = node.func
        if (
            kind is not None
            and isinstance(name, ast.Attribute)
            and isinstance(name.value, ast.Name)
            and name.value.id == "self"
        ):
            found = inspect.getattr_static(kind, name.attr, None)
            if isinstance(found, staticmethod):
                found = found.__func__
            if isinstance(found, types.FunctionType) and not found.__module__.startswith("torch."):
                yield found
        elif isinstance(name, ast.Name) and not name.id.startswith(REPLACED):
            found = function.__globals__.get(name.id)
            if isinstance(found, types.FunctionType) and found.__module__ == function.__module__:
                yield found


@lru_cache(maxsize=4096)
def functions_below(kind: type | None, function: Any) -> tuple[Any, ...]:
    """Return a function and all that it calls in its class and file, each once."""
    found = [function]
    for one in found:
        found += [other for other in called_functions(kind, one) if other not in found]
    return tuple(found)


@lru_cache(maxsize=4096)
def digest_of_function(function: Any, kind: type | None = None) -> str:
    """Return the digest of a function's source and of what it calls in its class and file."""
    prefix = "" if kind is None else prefix_of(kind)
    texts = [write(tree_of(one), prefix) for one in functions_below(kind, function)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def digest_of_class(kind: type) -> str:
    """Return the digest of a class's forward."""
    return digest_of_function(function_of(kind), kind)


def prefix_of(kind: type) -> str:
    """Return the name of the model in a class's name: that of `FooRMSNorm` is `Foo`."""
    name = kind.__name__
    for ending in ENDINGS:
        if name.endswith(ending):
            return name.removesuffix(ending)
    return ""


@lru_cache(maxsize=1024)
def find_siblings(function: Any) -> tuple[tuple[str, ...], ...]:
    """Return groups of children that a forward calls with one name, which is not assigned in between."""
    finder = _Siblings()
    finder.visit(tree_of(function))
    return tuple(tuple(names) for names in finder.by_input.values() if len(names) > 1)


class _Siblings(ast.NodeVisitor):
    """Collect calls `self.child(name)` by name and by how often the name was assigned before."""

    def __init__(self) -> None:
        self.assigned: dict[str, int] = {}
        self.by_input: dict[tuple[str, int], list[str]] = {}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._assign(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._assign(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        child = node.func
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
            and len(node.args) == 1
            and not node.keywords
            and isinstance(node.args[0], ast.Name)
        ):
            name = node.args[0].id
            called = self.by_input.setdefault((name, self.assigned.get(name, 0)), [])
            if child.attr not in called:
                called.append(child.attr)

    def _assign(self, target: ast.expr) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.assigned[node.id] = self.assigned.get(node.id, 0) + 1


def siblings_in(module: nn.Module, is_linear: Any) -> list[tuple[str, ...]]:
    """Return the names of the children of a composite that share an input and are linear layers."""
    found = []
    for names in find_siblings(function_of(plain_type(module))):
        linears = tuple(name for name in names if is_linear(getattr(module, name, None)))
        if len(linears) > 1:
            found.append(linears)
    return found
