"""The two domains of expressions: names, which are compared with a kernel's, and values, which are bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from isobit.certifying.machine.registers import select_half
from isobit.certifying.names import arithmetic, names
from isobit.certifying.names.leaf import multiply_accumulate, rule_of
from isobit.certifying.names.maxima import SETS
from isobit.certifying.names.names import Array

ONE_NAN = {"f32": 0x7FC00000, "bf16": 0x7FC0, "f16": 0x7E00}  # of isobit's results


class Domain(ABC):
    """Operations on arrays of fp32 and 16-bit values; each is one rounding, as its name says."""

    @abstractmethod
    def constant(self, value: float) -> Array:
        """Return an fp32 constant."""

    @abstractmethod
    def constant16(self, bits: int) -> Array:
        """Return a 16-bit constant."""

    @abstractmethod
    def add(self, a: Array, b: Array) -> Array:
        """Return a + b."""

    @abstractmethod
    def sub(self, a: Array, b: Array) -> Array:
        """Return a - b."""

    @abstractmethod
    def mul(self, a: Array, b: Array) -> Array:
        """Return a · b."""

    @abstractmethod
    def fma(self, a: Array, b: Array, c: Array) -> Array:
        """Return a · b + c, rounded once."""

    @abstractmethod
    def div(self, a: Array, b: Array) -> Array:
        """Return a / b."""

    @abstractmethod
    def sqrt(self, a: Array) -> Array:
        """Return the square root."""

    @abstractmethod
    def maximum(self, operands: Sequence[Array]) -> Array:
        """Return the largest of at least two; a NaN loses. It has no order."""

    @abstractmethod
    def choose(self, test: str, a: Array, b: Array, yes: Array, no: Array) -> Array:
        """Return `yes` where a is less than ("lt") or equal to ("eq") b, else `no`."""

    @abstractmethod
    def settle(self, total: Array, rounded: Array, dtype: str) -> Array:
        """Return fp32 results, rounded to dtype, with every NaN replaced by the one of isobit's results."""

    @abstractmethod
    def shift_left(self, a: Array, count: int) -> Array:
        """Return the fp32 value whose bits are those of a, shifted."""

    @abstractmethod
    def widen(self, a: Array, dtype: str) -> Array:
        """Return 16-bit values as fp32."""

    @abstractmethod
    def round(self, a: Array, dtype: str) -> Array:
        """Return fp32 values rounded to 16 bits."""

    @abstractmethod
    def dot(self, a: Array, b: Array, c: Array, engine: str, dtype: str) -> Array:
        """Return [..., M, N]: c plus a [..., M, K] against b [..., N, K], a chain of the engine's steps."""


class Names(Domain):
    """Expressions by their names; see [Note: names] in isobit/certifying/names/names.py."""

    def constant(self, value: float) -> Array:
        return np.asarray(names.constant_float(value))

    def constant16(self, bits: int) -> Array:
        return names.constant16(bits)

    def add(self, a: Array, b: Array) -> Array:
        return names.add(a, b)

    def sub(self, a: Array, b: Array) -> Array:
        return names.sub(a, b)

    def mul(self, a: Array, b: Array) -> Array:
        return names.mul(a, b)

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        return names.fma(a, b, c)

    def div(self, a: Array, b: Array) -> Array:
        return names.div(a, b)

    def sqrt(self, a: Array) -> Array:
        return names.sqrt(a)

    def maximum(self, operands: Sequence[Array]) -> Array:
        return SETS.join("max", operands)

    def choose(self, test: str, a: Array, b: Array, yes: Array, no: Array) -> Array:
        return names.select(names.make(f"setp.{test}.f32", a, b), yes, no)

    def settle(self, total: Array, rounded: Array, dtype: str) -> Array:
        is_nan = names.make("setp.nan.f32", total, total)
        if dtype == "f32":
            return names.select(is_nan, names.constant(ONE_NAN[dtype]), rounded)
        one_nan = names.half16(names.constant16(ONE_NAN[dtype]))
        return names.value16(select_half(is_nan, one_nan, names.half16(rounded)))

    def shift_left(self, a: Array, count: int) -> Array:
        return names.make("shl.b32", a, names.constant(count))

    def widen(self, a: Array, dtype: str) -> Array:
        return names.widen(dtype, a)

    def round(self, a: Array, dtype: str) -> Array:
        return names.round_to(dtype, a)

    def dot(self, a: Array, b: Array, c: Array, engine: str, dtype: str) -> Array:
        return names.dot_tile(a, b, c, engine, dtype, rule_of(engine, dtype).products)


class Values(Domain):
    """Expressions by their bits: float32 arrays, and uint16 arrays for 16-bit values."""

    def constant(self, value: float) -> Array:
        return np.asarray(np.float32(value))

    def constant16(self, bits: int) -> Array:
        return np.asarray(np.uint16(bits))

    def add(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(a + b)

    def sub(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(a - b)

    def mul(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(a * b)

    def fma(self, a: Array, b: Array, c: Array) -> Array:
        return arithmetic.fma(*np.broadcast_arrays(a, b, c))

    def div(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(a / b)

    def sqrt(self, a: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.sqrt(a))

    def maximum(self, operands: Sequence[Array]) -> Array:
        return np.asarray(np.fmax.reduce(np.broadcast_arrays(*operands)))

    def choose(self, test: str, a: Array, b: Array, yes: Array, no: Array) -> Array:
        return np.where((np.less if test == "lt" else np.equal)(a, b), yes, no)

    def settle(self, total: Array, rounded: Array, dtype: str) -> Array:
        bits = np.ascontiguousarray(rounded).view(np.uint32 if dtype == "f32" else np.uint16)
        settled = np.where(np.isnan(total), bits.dtype.type(ONE_NAN[dtype]), bits)
        return np.asarray(settled.view(rounded.dtype))

    def shift_left(self, a: Array, count: int) -> Array:
        bits = np.ascontiguousarray(a).view(np.uint32) << np.uint32(count)
        return np.asarray(bits.view(np.float32))

    def widen(self, a: Array, dtype: str) -> Array:
        return arithmetic.widen(a, dtype)

    def round(self, a: Array, dtype: str) -> Array:
        if dtype == "f16":
            return arithmetic.round_f16(a)
        return arithmetic.round_bf16(np.ascontiguousarray(a).view(np.uint32))

    def dot(self, a: Array, b: Array, c: Array, engine: str, dtype: str) -> Array:
        return multiply_accumulate(a, b, c, engine, dtype)
