"""Bounds: how long an operator must take at least at its shapes, on a device with known peak rates.

[Note: What a bound is]
An operator must read every element of its inputs that its result depends on, write its output, and, for products, do
its multiplications. Divided by the vendor's peak rates, the larger of both is a time that no kernel can go below, if
its data come from memory. A call that is faster than that had data in the last-level cache, and the bound does not
apply to it; but no call can be faster than memory moves what the cache cannot hold (`Bound.strict`), or the formula is
wrong. Convolutions have no bound by products: Winograd's and Fourier's algorithms need fewer than the definition. What
has no formula here has no bound, and the profile says how much time that is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

SIZES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "long int": 8, "long": 8, "int": 4, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "short int": 2, "unsigned int": 4, "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1, "c10::complex<float>": 8,
}  # fmt: skip
RATES = {
    "float": "fp32", "double": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
PRODUCTS = {  # operator -> positions of the two factors
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2),
    "aten::baddbmm_": (1, 2), "aten::_scaled_mm": (0, 1), "aten::_addmm_activation": (1, 2),
}  # fmt: skip
# Inputs are read once and a result of the broadcast shape is written once. An `out=` is recorded as one more input, so
# only as many inputs count as the operator has.
ELEMENTWISE = {
    1: re.compile(
        r"aten::(?:neg|sqrt|rsqrt|reciprocal|exp|exp2|log|abs|sign|sin|cos|tanh|sigmoid|silu|gelu|relu|elu|leaky_relu|"
        r"hardtanh|hardswish|softplus|clamp|clamp_min|clamp_max|erf|floor|ceil|round|_softmax|_log_softmax|"
        r"native_dropout|tril|triu|flip|roll|cumsum)_?"
    ),
    2: re.compile(
        r"aten::(?:add|sub|rsub|mul|div|pow|maximum|minimum|masked_fill|threshold_backward|tanh_backward|"
        r"sigmoid_backward|silu_backward|gelu_backward|_softmax_backward_data|_log_softmax_backward_data|"
        r"native_dropout_backward)_?"
    ),
    3: re.compile(r"aten::(?:where|lerp|addcmul|addcdiv|native_layer_norm|_fused_rms_norm)_?"),
}
COMPARISONS = re.compile(
    r"aten::(?:eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|isnan|isinf|isfinite)"
)
# Each input is read once; the result is small or unknown.
REDUCTIONS = re.compile(
    r"aten::(?:sum|mean|amax|amin|max|min|argmax|argmin|all|any|prod|var|std|var_mean|norm|linalg_vector_norm|"
    r"native_batch_norm|cudnn_batch_norm|native_layer_norm_backward|native_batch_norm_backward|"
    r"cudnn_batch_norm_backward|nll_loss_forward|mse_loss|count_nonzero|logsumexp)"
)
FLASH = re.compile(r"aten::(_flash_attention|_efficient_attention)_(forward|backward)")
SDPA = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn|fused)\w*?(_backward)?|aten::scaled_dot_product_attention"
)
MOST_DIMENSIONS, LARGEST_SIZE = 16, 1 << 40  # so that no product is too large for a float
OPAQUE = re.compile(r"OpaqueType<(\d{1,2})u?>")


@dataclass(frozen=True)
class Machine:
    """Peak rates of one GPU; `source` says where they are from."""

    name: str
    pattern: str
    source: str
    fp32: float
    fp16: float
    bf16: float
    memory: float
    cache: float
    link: float
    fp8: float = 0.0

    def flops(self, rate: str) -> float:
        """Return the floating-point operations per second of a dtype."""
        found: float = getattr(self, rate)
        return (found or self.fp16) * 1e12


@dataclass(frozen=True)
class Need:
    """What an operator needs at its shapes: operations, bytes, and the dtype that sets the rate."""

    flops: int
    bytes: int
    rate: str


@lru_cache(maxsize=1)
def machines() -> tuple[Machine, ...]:
    """Return the machines with known rates."""
    text = (Path(__file__).parent / "machines.yaml").read_text()
    return tuple(Machine(**entry) for entry in yaml.safe_load(text))


def machine_of(device: str) -> Machine | None:
    """Return the rates of a device by its name, or None."""
    return next((machine for machine in machines() if re.search(machine.pattern, device)), None)


def need_of(
    name: str, dims: Any, types: Any, strides: Any, concrete: Any, kernel: str
) -> Need | None:
    """Return what an operator needs, or None if there is no formula for it or its shapes are incomplete.

    Args:
        name: The operator, such as "aten::mm".
        dims: The shapes of its inputs, as recorded.
        types: Their dtypes.
        strides: Their strides, if recorded.
        concrete: Its other arguments as text, if recorded.
        kernel: The name of its kernel: that of `cat` has the size of an element, which the inputs lack.
    """
    try:
        return find_need(name, dims, types, strides, concrete, kernel)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        return None  # shapes of another form than this operator's


def find_need(
    name: str, dims: Any, types: Any, strides: Any, concrete: Any, kernel: str
) -> Need | None:
    """Apply the formula of an operator."""
    if name in PRODUCTS:
        return product(name, dims, types, strides)
    if FLASH.match(name) or SDPA.match(name):
        return attention(name, dims, types, concrete)
    if name == "aten::cat":
        return concatenation(dims, kernel)
    inputs = next((n for n, names in ELEMENTWISE.items() if names.fullmatch(name)), len(dims))
    tensors = [
        (dims[i], types[i], strides[i] if i < len(strides) else None)
        for i in range(min(inputs, len(dims)))
        if is_shape(dims[i]) and types[i] in SIZES
    ]
    if not tensors:
        return None
    read = sum(distinct(shape, stride) * SIZES[dtype] for shape, dtype, stride in tensors)
    rate = RATES.get(tensors[0][1], "fp32")
    if name == "aten::copy_":
        (out, to, _), (_, source, stride) = tensors[0], tensors[1]
        return Need(
            0, count(out) * SIZES[to] + distinct(tensors[1][0], stride) * SIZES[source], rate
        )
    if name in ("aten::fill_", "aten::zero_"):
        return Need(0, count(tensors[0][0]) * SIZES[tensors[0][1]], rate)
    if name in ("aten::index_select", "aten::embedding", "aten::gather"):
        shape, dtype, _ = tensors[0]
        indices, index_type, stride = tensors[1]
        # The dimension that is indexed is not recorded everywhere; with the longest one a row is shortest.
        row = 1 if name == "aten::gather" else count(shape) // max(max(shape), 1)
        rows = count(indices) * row * SIZES[dtype]
        return Need(0, rows + distinct(indices, stride) * SIZES[index_type], rate)
    if any(names.fullmatch(name) for names in ELEMENTWISE.values()):
        return Need(0, read + written(name, tensors), rate)
    if COMPARISONS.match(name):
        return Need(0, read + count(broadcast([shape for shape, _, _ in tensors])), rate)
    if REDUCTIONS.fullmatch(name):
        return Need(0, read, rate)
    return None


def product(name: str, dims: Any, types: Any, strides: Any) -> Need:
    """Return the need of a matrix product, batched or not."""
    left, right = PRODUCTS[name]
    *batch, rows, inner = whole(dims[left])
    *_, again, columns = whole(dims[right])
    if inner != again:
        raise ValueError("factors that do not fit")
    dtype = types[left]
    many = math.prod(batch)
    factors = sum(
        distinct(dims[i], strides[i] if i < len(strides) else None) * SIZES[types[i]]
        for i in (left, right)
    )
    output = many * rows * columns * (2 if name == "aten::_scaled_mm" else SIZES[dtype])
    return Need(2 * many * rows * inner * columns, factors + output, RATES[dtype])


def attention(name: str, dims: Any, types: Any, concrete: Any) -> Need:
    """Return the need of an attention: a causal one, or one that may be, needs half of the products."""
    backward = name.endswith("backward")
    first = 1 if backward else 0  # the gradient comes before query, key and value
    query, key, value = (whole(dims[first + i]) for i in range(3))
    if len(query) != 4:
        raise ValueError("packed sequences: their lengths are not recorded")
    flash = (
        FLASH.match(name) is not None
    )  # batch, length, heads, depth; the others have heads before lengths
    batch, depth, out_depth = query[0], query[3], value[3]
    length, heads = (query[1], query[2]) if flash else (query[2], query[1])
    keys = key[1] if flash else key[2]
    words = (
        [word for word in concrete if isinstance(word, str)] if isinstance(concrete, list) else []
    )
    full = "True" not in words and words != []
    least = min(
        length, keys
    )  # a causal mask starts at the first key or ends at the last: the fewer pairs
    pairs = length * keys if full else least * (least + 1) // 2
    flops = 2 * batch * heads * pairs * (depth + out_depth)
    size = SIZES[types[first]]
    moved = (math.prod(query) + math.prod(key) + math.prod(value)) * size
    moved += batch * heads * length * out_depth * size
    if backward:  # five products instead of two, and three gradients
        return Need(flops * 5 // 2, 2 * moved, RATES[types[first]])
    return Need(flops, moved, RATES[types[first]])


def concatenation(dims: Any, kernel: str) -> Need | None:
    """Return the need of `cat`: every element is read and written; the kernel's name has the size of one."""
    found = OPAQUE.search(kernel)
    if found is None:
        return None
    elements = sum(count(shape) for shape in dims[0])
    return Need(0, 2 * elements * int(found[1]), "fp32")


def written(name: str, tensors: list[Any]) -> int:
    """Return the bytes that an elementwise operator writes: the broadcast shape, in its inputs' smallest dtype."""
    if name.endswith("_"):
        return count(tensors[0][0]) * SIZES[tensors[0][1]]
    shaped = [SIZES[dtype] for shape, dtype, _ in tensors if shape and dtype != "bool"]
    return count(broadcast([shape for shape, _, _ in tensors])) * min(shaped, default=1)


def is_shape(value: Any) -> bool:
    """Whether a recorded size is that of one tensor; that of a list of tensors is a list of lists."""
    return (
        isinstance(value, list)
        and 0 < len(value) <= MOST_DIMENSIONS
        and all(type(size) is int and size < LARGEST_SIZE for size in value)
    )


def whole(shape: Any) -> list[int]:
    """Return a shape, or raise ValueError if it is none."""
    if not is_shape(shape) or min(shape) < 0:
        raise ValueError("no shape")
    found: list[int] = shape
    return found


def count(shape: Any) -> int:
    """Return the number of elements of a shape."""
    return math.prod(whole(shape))


def distinct(shape: Any, stride: Any) -> int:
    """Return the number of elements in memory: an expanded dimension, of stride 0, has one."""
    if not isinstance(stride, list) or len(stride) != len(shape):
        return count(shape)
    return math.prod(
        size for size, step in zip(whole(shape), stride, strict=True) if step != 0 or not size
    )


def broadcast(shapes: list[Any]) -> list[int]:
    """Return the shape that several shapes broadcast to."""
    longest = max(len(shape) for shape in shapes)
    padded = [[1] * (longest - len(shape)) + whole(shape) for shape in shapes]
    return [max(sizes) for sizes in zip(*padded, strict=True)]


@dataclass(frozen=True)
class Bound:
    """Nanoseconds that a call takes at least, rounded down.

    Attributes:
        ns: If its data come from memory.
        by: What sets it.
        strict: Whatever the cache holds.
        flops, moved: Operations and bytes that it needs.
    """

    ns: int
    by: str
    strict: int
    flops: int = 0
    moved: int = 0


def least_time(need: Need, machine: Machine) -> Bound:
    """Return the bound of an operator."""
    computing = need.flops / machine.flops(need.rate) * 1e9
    moving, uncached = memory_times(need.bytes, machine)
    by = f"{need.rate} products" if computing > moving else "memory"
    longest, strict = int(max(computing, moving)), int(max(computing, uncached))
    return Bound(longest, by, strict, need.flops, need.bytes)


def memory_times(size: int, machine: Machine) -> tuple[float, float]:
    """Return the nanoseconds in which memory moves these bytes, and those of them that no cache can hold."""
    rate = machine.memory * 1e12 / 1e9
    return size / rate, max(0.0, size - machine.cache * 1e6) / rate


def least_copy(name: str, size: int, machine: Machine) -> Bound | None:
    """Return the bound of a copy: over the host's link, or twice through the device's memory."""
    if "DtoD" in name:
        moving, uncached = memory_times(2 * size, machine)
        return Bound(int(moving), "memory", int(uncached))
    if "HtoD" in name or "DtoH" in name:
        linked = int(size / (machine.link * 1e9) * 1e9)
        return Bound(linked, "host link", linked)
    return None
