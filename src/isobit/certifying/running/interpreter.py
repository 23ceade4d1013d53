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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from isobit.certifying.names.arithmetic import round_bf16, widen
from isobit.certifying.names.leaf import chain, fused_multiply_add, multiply_accumulate, rule_of
from isobit.errors import ArgumentError, IsobitError, UnsupportedError

# The operations of Triton's interpreter that are replaced, and those that raise.

ALLOWED = ("reductions", "approximations", "atomics")
# On a GPU these are approximations: of PTX, or of the vendor's library. The exact ones have names of their own.
APPROXIMATE = {
    "create_fdiv": ("x / y", "tl.div_rn(x, y)"),
    "create_sqrt": ("tl.sqrt", "tl.sqrt_rn"),
    "create_rsqrt": ("tl.rsqrt", "tl.div_rn and tl.sqrt_rn"),
    "create_exp": ("tl.exp", "your own chain of tl.math.fma"),
    "create_exp2": ("tl.exp2", "your own chain of tl.math.fma"),
    "create_log": ("tl.log", "your own chain of tl.math.fma"),
    "create_log2": ("tl.log2", "your own chain of tl.math.fma"),
    "create_sin": ("tl.sin", "your own chain of tl.math.fma"),
    "create_cos": ("tl.cos", "your own chain of tl.math.fma"),
    "create_erf": ("tl.erf", "your own chain of tl.math.fma"),
}
ZERO_DOT = "isobit: a product that no accumulator was given to"

Replacement = tuple[Any, str, Callable[[Any], Any]]


def replacements_of_operations(settings: Callable[[], Any]) -> list[Replacement]:
    """Return (owner, name, function of the original); `settings` is None for a thread without a context.

    A replacement is called with the original method, the settings, and what the method is called with.
    """
    interpreter = import_module("triton.runtime.interpreter")
    builder: dict[str, Callable[..., Any]] = {
        "create_dot": create_dot,
        "create_fma": create_fma,
        "create_fadd": create_fadd,
        "create_maxnumf": create_maxnumf,
        "create_minnumf": create_minnumf,
        "cast_impl": cast,
        "binary_op": compute_patterns,
        "unary_op": compute_patterns,
        "ternary_op": compute_patterns,
        "create_atomic_rmw": create_atomic_rmw,
        **{name: refuse_approximation(name) for name in APPROXIMATE},
    }
    found: list[tuple[Any, str, Callable[..., Any]]]
    found = [(interpreter.InterpreterBuilder, name, new) for name, new in builder.items()]
    found += [
        (owner, "apply_impl", reduce) for owner in (interpreter.ReduceOps, interpreter.ScanOps)
    ]
    return [(owner, name, when_set(settings, new)) for owner, name, new in found]


def when_set(settings: Callable[[], Any], new: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of a method: the method that calls `new` in a thread with settings."""

    def make(original: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = settings()
            if found is None:
                return original(self, *args, **kwargs)
            return new(original, found, self, *args, **kwargs)

        return method

    return make


def create_dot(
    original: Any, settings: Any, self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any
) -> Any:
    if not a.dtype.scalar.is_floating():
        return original(self, a, b, d, precision, imprecise)  # integers have no order
    result = type(d)(dot(a, b, d, precision, settings.engine), d.dtype.scalar)
    # A product with max_num_imprecise_acc starts from its accumulator also where it is added to a tile.
    if not imprecise and not d.data.view(np.uint32).any():
        result.set_attr(ZERO_DOT, True)
    return result


def create_fma(_original: Any, _settings: Any, _self: Any, x: Any, y: Any, z: Any) -> Any:
    refuse_type("tl.math.fma", ("fp32",), x, y, z)
    operands = np.broadcast_arrays(x.data, y.data, z.data)
    return type(z)(fused_multiply_add(*operands), z.dtype.scalar)


def create_fadd(original: Any, _settings: Any, self: Any, lhs: Any, rhs: Any) -> Any:
    if ZERO_DOT in lhs.attr or ZERO_DOT in rhs.attr:
        raise UnsupportedError(
            expected="a product with its accumulator: acc = tl.dot(a, b, acc)",
            received="tl.dot(a, b) + acc, which Triton's compiler changes into tl.dot(a, b, acc)",
            remedy="pass the accumulator to tl.dot",
        )
    return original(self, lhs, rhs)


def create_maxnumf(_original: Any, _settings: Any, self: Any, lhs: Any, rhs: Any) -> Any:
    """Return the larger, as a GPU does: a NaN loses, and +0 is larger than -0."""
    return self.binary_op(lhs, rhs, maximum)


def create_minnumf(_original: Any, _settings: Any, self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, minimum)


def maximum(a: Any, b: Any) -> Any:
    return np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))


def minimum(a: Any, b: Any) -> Any:
    return -maximum(-a, -b)


def cast(original: Any, _settings: Any, self: Any, src: Any, dst_type: Any) -> Any:
    """Convert between fp32 and bf16 as a GPU does; Triton's interpreter truncates to bf16."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source.is_fp32() and target.is_bf16():
        data = round_bf16(np.ascontiguousarray(src.data).view(np.uint32))
    elif source.is_bf16() and target.is_fp32():
        data = widen(np.ascontiguousarray(src.data).view(np.uint16), "bf16")
    else:
        return original(self, src, dst_type)
    return type(src)(data.reshape(src.data.shape), target)


def compute_patterns(original: Any, _settings: Any, self: Any, *args: Any) -> Any:
    """Refuse arithmetic on types that the interpreter holds as integers; the last argument is the operation."""
    *operands, operation = args
    for operand in operands:
        scalar = operand.dtype.scalar
        if (scalar.is_bf16() or scalar.is_fp8()) and operation is not np.where:
            what = f"arithmetic ({operation.__name__}) in the interpreter"
            refuse_type(what, ("fp16", "fp32", "fp64"), operand)
    return original(self, *args)


def refuse_approximation(name: str) -> Callable[..., Any]:
    shown, exact = APPROXIMATE[name]

    def check(original: Any, settings: Any, self: Any, *args: Any) -> Any:
        if "approximations" not in settings.allow:
            raise UnsupportedError(
                expected="operations that are rounded correctly",
                received=f"{shown}, which a GPU approximates",
                remedy=f'use {exact}, or pass allow=["approximations"] for numpy\'s value',
            )
        return original(self, *args)

    return check


def reduce(original: Any, settings: Any, self: Any, operands: Any) -> Any:
    """Refuse reductions and scans of floats, except maxima and minima."""
    standard = import_module("triton.language.standard")
    free = (
        standard._elementwise_max,
        standard._elementwise_min,
        standard._argmax_combine_tie_break_left,
        standard._argmin_combine_tie_break_left,
    )
    floats = any(operand.dtype.is_floating() for operand in operands)
    ordered = floats and not any(self.combine_fn is function for function in free)
    if ordered and "reductions" not in settings.allow:
        raise UnsupportedError(
            expected="sums of floats whose order the kernel states",
            received="a reduction or scan (tl.sum, tl.reduce, tl.cumsum), whose order depends on the layout",
            remedy="write the tree: reshape to (..., n // 2, 2), tl.split, add; or certify the compiled kernel; "
            'or pass allow=["reductions"] for numpy\'s order, which no GPU has',
        )
    with warnings.catch_warnings():  # a GPU has none
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        return original(self, operands)


def create_atomic_rmw(
    original: Any, settings: Any, self: Any, kind: Any, ptr: Any, val: Any, *rest: Any
) -> Any:
    adds = val.dtype.scalar.is_floating() and "FADD" in str(kind)
    if adds and "atomics" not in settings.allow:
        raise UnsupportedError(
            expected="sums of floats whose order the kernel states",
            received="tl.atomic_add of floats: programs add in the order in which they arrive",
            remedy='store partial sums and add them in a second kernel, or pass allow=["atomics"] for one order',
        )
    return original(self, kind, ptr, val, *rest)


def dot(a: Any, b: Any, d: Any, precision: Any, engine: str) -> Any:
    """Return the product of two handles on top of an accumulator in fp32."""
    name = a.dtype.scalar.name
    refuse_type("tl.dot with a result in fp32", ("fp32",), d)
    refuse_type("tl.dot in the interpreter", ("bf16", "fp16", "fp32"), a, b)
    left, right = np.asarray(a.data), np.swapaxes(b.data, -1, -2)  # [..., M, K], [..., N, K]
    if name == "fp32" and precision.name == "IEEE":
        return chain(left, right, d.data)
    if name == "fp32" and precision.name != "TF32":
        raise UnsupportedError(
            expected='input_precision "ieee" or "tf32" of tl.dot in fp32',
            received=precision.name,
            remedy='pass input_precision="ieee"',
        )
    pattern, dtype = {
        "bf16": (np.uint16, "bf16"),
        "fp16": (np.uint16, "f16"),
        "fp32": (np.uint32, "tf32"),
    }[name]
    left, right = (np.ascontiguousarray(x).view(pattern) for x in (left, right))
    return multiply_accumulate(left, right, np.asarray(d.data), engine, dtype)


def refuse_type(what: str, supported: tuple[str, ...], *operands: Any) -> None:
    for operand in operands:
        if operand.dtype.scalar.name not in supported:
            raise UnsupportedError(
                expected=f"{what} of {', '.join(supported)}",
                received=operand.dtype.scalar.name,
                remedy=f"convert with .to(tl.{'float32' if 'fp32' in supported else supported[0]}) first",
            )


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
