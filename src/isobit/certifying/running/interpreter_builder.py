"""The operations of Triton's interpreter that are replaced, and those that raise; see interpreter.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from isobit.certifying.names.arithmetic import round_bf16, widen
from isobit.certifying.names.fma import chain, fused_multiply_add
from isobit.certifying.names.leaf import multiply_accumulate
from isobit.errors import UnsupportedError

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
