"""Run Triton kernels in Triton's interpreter with the arithmetic of a GPU.

[Note: what the interpreter of Triton gets wrong, and what is done here]
Triton's interpreter runs a kernel in numpy. Its `tl.dot` is a BLAS call (and reads bf16 as integers), `tl.math.fma`
rounds twice, elementwise bf16 is integer arithmetic on the patterns. Within `interpreted`, `tl.dot` is the leaf of an
engine, `tl.math.fma` is fused, and what numpy cannot do as a GPU does raises UnsupportedError.

Triton's own functions are replaced while a context is open. The replacements ask which engine the current thread has
set, so other threads keep stock behaviour. A launch replaces functions of `triton.language` for its duration, and there
is one grid position for all threads; so launches take turns.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from isobit.certifying.names.leaf import rule_of
from isobit.certifying.running.interpreter_builder import ALLOWED, replacements_of_operations
from isobit.errors import ArgumentError, IsobitError, UnsupportedError


@dataclass(frozen=True)
class Settings:
    """What one context has set."""

    engine: str
    allow: frozenset[str]


SETTINGS: ContextVar[Settings | None] = ContextVar("isobit_interpreter", default=None)
LAUNCH = threading.RLock()
REWRITTEN: dict[
    Any, Any
] = {}  # of the launch that runs: function -> function that the interpreter can call
# Of the launch that runs: modules whose functions are replaced. A helper that uses no other needs nothing.
PATCHED: set[str] = set()
CODE: WeakKeyDictionary[Any, CodeType | None] = WeakKeyDictionary()


class Replacements:
    """Functions of Triton that are replaced while at least one context is open."""

    def __init__(self) -> None:
        self.open = 0
        self.originals: list[tuple[Any, str, Any]] = []

    def enter(self) -> None:
        with LAUNCH:
            self.open += 1
            if self.open > 1:
                return
            for owner, name, make in [
                *replacements_of_launches(),
                *replacements_of_operations(SETTINGS.get),
            ]:
                original = owner.__dict__[name]
                self.originals.append((owner, name, original))
                setattr(owner, name, make(original))

    def leave(self) -> None:
        with LAUNCH:
            self.open -= 1
            while not self.open and self.originals:
                owner, name, original = self.originals.pop()
                setattr(owner, name, original)


REPLACEMENTS = Replacements()


@contextmanager
def interpreted(engine: str = "tc25x16", allow: Iterable[str] = ()) -> Iterator[None]:
    """Interpret every Triton kernel that this thread launches in the block, with the arithmetic of an engine.

    Kernels need neither a GPU nor `TRITON_INTERPRET=1`; tensors are on the CPU. Contexts nest: the inner engine counts.
    Other threads are not affected.

    Args:
        engine: The matrix unit: "tc24x8" (Ampere, Ada), "tc25x16" (Hopper, Blackwell) or "cdna3" (gfx942).
        allow: What may run although its bits are not a GPU's: "reductions" (tl.sum, tl.reduce, scans of floats, in
            numpy's order), "approximations" (`/`, tl.exp, tl.log, tl.sqrt and others, by numpy), "atomics" (of floats,
            one order of many).

    Returns:
        A context manager.

    Raises:
        UnsupportedError: The engine is not known, or a kernel does what the interpreter cannot do as a GPU does.
        ArgumentError: `allow` has an unknown name.

    Example:
        >>> import isobit.certifying
        >>> with isobit.certifying.interpreted(engine="tc24x8"):
        ...     pass  # kernel[grid](...), or code that launches kernels
    """
    token = SETTINGS.set(settings_of(engine, allow))
    try:
        REPLACEMENTS.enter()
        try:
            yield
        finally:
            REPLACEMENTS.leave()
    finally:
        SETTINGS.reset(token)


def settings_of(engine: str, allow: Iterable[str]) -> Settings:
    rule_of(engine, "bf16")
    allowed = frozenset([allow] if isinstance(allow, str) else allow)
    if not allowed <= set(ALLOWED):
        raise ArgumentError(
            expected=f"allow with names from {', '.join(ALLOWED)}",
            received=", ".join(sorted(allowed - set(ALLOWED))),
            remedy="remove the name, or correct it",
        )
    return Settings(engine, allowed)


class InterpretedKernel:
    """A kernel that runs in the interpreter: `interpreted_kernel[grid](...)`."""

    def __init__(self, kernel: Any, engine: str, allow: Iterable[str]) -> None:
        self.kernel, self.settings = kernel, settings_of(engine, allow)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return the launcher for a grid: a tuple, or a function of the kernel's arguments."""

        def launch(*args: Any, **kwargs: Any) -> None:
            with interpreted(self.settings.engine, self.settings.allow):
                self.kernel[grid](*args, **kwargs)

        return launch


def interpret(kernel: Any, engine: str = "tc25x16", allow: Iterable[str] = ()) -> InterpretedKernel:
    """Return a kernel that runs in the interpreter, whether or not `TRITON_INTERPRET` was set when it was decorated.

    Args:
        kernel: A `@triton.jit` function.
        engine: As in `interpreted`.
        allow: As in `interpreted`.

    Returns:
        An object that is launched as the kernel is: `interpret(kernel)[grid](...)`.

    Raises:
        UnsupportedError: The kernel is not a `@triton.jit` function, such as one that is autotuned.

    Example:
        >>> import isobit.certifying, triton, triton.language as tl
        >>> @triton.jit
        ... def double(x, n: tl.constexpr):
        ...     i = tl.arange(0, n)
        ...     tl.store(x + i, tl.load(x + i) * 2)
        >>> x = torch.ones(4)
        >>> isobit.certifying.interpret(double)[(1,)](x, n=4)
        >>> x
        tensor([2., 2., 2., 2.])
    """
    jit, interpreter = triton_modules()
    if not isinstance(kernel, (jit.JITFunction, interpreter.InterpretedFunction)):
        raise UnsupportedError(
            expected="a @triton.jit function",
            received=f"{type(kernel).__module__}.{type(kernel).__qualname__}",
            remedy="pass the function that it wraps (kernel.fn of an autotuned kernel), and its constants as arguments",
        )
    return InterpretedKernel(kernel, engine, allow)


def triton_modules() -> tuple[Any, Any]:
    return import_module("triton.runtime.jit"), import_module("triton.runtime.interpreter")


def replacements_of_launches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return (owner, name, function of the original) for what launches kernels and calls their helpers."""
    jit, interpreter = triton_modules()

    def run(original: Any) -> Any:
        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            with (
                LAUNCH
            ):  # also of stock kernels: they must not be compiled while triton.language is patched
                if SETTINGS.get() is None:
                    return original(self, *args, grid=grid, warmup=warmup, **kwargs)
                return None if warmup else launch(self, grid, args, kwargs)

        return run

    def call(original: Any) -> Any:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if SETTINGS.get() is None:
                return original(self, *args, **kwargs)
            function = rewrite(self.fn)
            if languages_of(function) <= PATCHED:
                return function(*args, **kwargs)
            scope = interpreter._patch_lang(function)
            try:
                return function(*args, **kwargs)
            finally:
                scope.restore()

        return __call__

    owners = (jit.JITFunction, interpreter.InterpretedFunction)
    return [
        (owner, name, make) for owner in owners for name, make in (("run", run), ("__call__", call))
    ]


def launch(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run a kernel over its grid, program after program."""
    jit, interpreter = triton_modules()
    core = import_module("triton.language.core")
    scope = interpreter._LangPatchScope()
    own = set(vars(core.tensor))
    REWRITTEN.clear()
    try:
        # A helper that is a method, as in x.sum(): a JITFunction does not bind itself.
        for name, member in list(vars(core.tensor).items()):
            if isinstance(member, jit.JITFunction):
                scope.set_attr(core.tensor, name, bind(member))
        hooks, function = kernel.pre_run_hooks, rewrite(kernel.fn)
        run = interpreter.GridExecutor(function, kernel.arg_names, grid, hooks)
        PATCHED.update(languages_of(function))
        with np.errstate(all="ignore"):  # a GPU has no warnings
            run(*args, **kwargs)
    except interpreter.InterpreterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, IsobitError):
            cause = cause.__cause__
        raise (cause or error) from None
    finally:
        scope.restore()
        for name in set(vars(core.tensor)) - own:  # inherited ones, which Triton "restores" as own
            delattr(core.tensor, name)
        REWRITTEN.clear()
        PATCHED.clear()


def languages_of(function: Any) -> set[str]:
    """Return which of Triton's modules the interpreter replaces functions of, for a function's sake."""
    known = ("triton.language", "triton.language.core")
    found = (getattr(value, "__name__", "") for value in function.__globals__.values())
    return {name for name in found if name in known}


def bind(helper: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: helper(self, *args, **kwargs)


def rewrite(function: Any) -> Any:
    """Return a copy of a function for the interpreter; Triton adds names to the globals of what it rewrites."""
    if function not in REWRITTEN:
        _, interpreter = triton_modules()
        names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        code = rewritten_code(function, names)
        if code is None:  # made without a source
            return function
        names.update({k: v for k, v in vars(interpreter).items() if k not in names})
        defined: dict[str, Any] = {}
        exec(code, names, defined)
        REWRITTEN[function] = defined[function.__name__]
    return REWRITTEN[function]


def rewritten_code(function: Any, names: dict[str, Any]) -> CodeType | None:
    """Return the code that defines a function for the interpreter; parsed once, as its text does not change."""
    if function not in CODE:
        _, interpreter = triton_modules()
        copy = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__annotations__ = function.__annotations__
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        rewriter = interpreter.FunctionRewriter(copy)
        rewriter._compile_and_exec = lambda tree: compile(tree, rewriter.filename, "exec")
        found = rewriter.rewrite_ast()
        CODE[function] = found if isinstance(found, CodeType) else None
    return CODE[function]
