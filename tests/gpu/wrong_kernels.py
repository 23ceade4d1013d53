"""Kernels that break the rules for kernels."""

import triton
import triton.language as tl
from triton.language.math import fma


@triton.jit
def approximate(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.exp(tl.load(x + at)))


@triton.jit
def atomic(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(y + at * 0, tl.load(x + at))


@triton.jit
def fused(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, fma(value, value, value))


@triton.jit
def product_and_sum(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, value * value + value)
