"""The matrix instructions that Triton emits, their oracle, and inputs that tell one arithmetic from another.

The oracle is mmasim (arXiv 2511.10909), a development dependency. tests/certifying/test_leaf_census.py compiles
`tl.dot` for every target and requires that this list has each instruction that it finds.
"""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.certifying.names import leaf

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
KINDS = ("ordinary", "wide", "cancelling", "subnormal", "largest", "special")
ROWS = 16  # a tile has ROWS × ROWS outputs


@dataclass(frozen=True)
class Instruction:
    """One instruction on one target, as PTX or the AMD assembler names it."""

    target: str
    name: str
    engine: str
    dtype: str
    dtype_b: str
    oracle: tuple[str, str, str]  # class of mmasim, architecture, name there

    @property
    def label(self):
        return f"{self.target} {self.name}"

    def model(self):
        """The oracle; mmasim compiles 17 lines of C++ at its first import, and keeps them."""
        from mmasim.amd.sim import MFMA
        from mmasim.nv_ptx import sim

        family, architecture, name = self.oracle
        kind = {"MFMA": MFMA}.get(family) or getattr(sim, family)
        return kind(architecture, name)


def mma(target, architecture, engine, a, b=None, k=16):
    b = b or a
    name = f"m16n8k{k}.f32.{a}.{b}.f32"
    return Instruction(target, f"mma.sync {name}", engine, a, b, ("MMA", architecture, name))


def wgmma(a, b=None, k=16, n=64, engine="tc25x16"):
    b = b or a
    name = f"m64n{n}k{k}.f32.{a}.{b}"
    return Instruction("sm_90", f"wgmma {name}", engine, a, b, ("WGMMA", "Hopper", name))


def tcgen05(kind, a, b=None, k=16, engine="tc25x16"):
    b = b or a
    types = f"kind::{kind}.f32.{a}.{b}"
    oracle = ("TCGen05MMA", "Blackwell", f"m128n128k{k}.{types}")
    return Instruction("sm_100", f"tcgen05.mma {types}", engine, a, b, oracle)


def mfma(shape, name, dtype):
    full = f"f32_{shape}_{name}"
    return Instruction("gfx942", f"v_mfma_{full}", "cdna3", dtype, dtype, ("MFMA", "CDNA3", full))


SYNC = (
    ("sm_80", "Ampere", "tc24x8"),
    ("sm_89", "Ada Lovelace", "tc24x8"),
    ("sm_90", "Hopper", "tc25x16"),
    ("sm_100", "Blackwell", "tc25x16"),
    ("sm_120", "RTX Blackwell", "tc25x16"),
)
EIGHT_BIT = (("e4m3", "e4m3"), ("e5m2", "e5m2"))
INSTRUCTIONS = [
    *(mma(*where, dtype) for where in SYNC for dtype in ("bf16", "f16")),
    *(mma(*where, "tf32", k=8) for where in SYNC),
    *(wgmma(dtype, n=n) for dtype in ("bf16", "f16") for n in (64, 128)),
    *(wgmma("tf32", k=8, n=n) for n in (64, 128)),
    *(tcgen05("f16", dtype) for dtype in ("bf16", "f16")),
    tcgen05("tf32", "tf32", k=8),
    *(mfma(shape, name, name) for shape in ("16x16x16", "32x32x8") for name in ("bf16", "f16")),
    *(mfma(shape, "xf32", "tf32") for shape in ("16x16x8", "32x32x4")),
    *(mma("sm_89", "Ada Lovelace", "tc13x16", a, b, k=32) for a, b in EIGHT_BIT),
    *(wgmma(a, b, k=32, n=n, engine="tc13x32") for a, b in EIGHT_BIT for n in (64, 128)),
    *(tcgen05("f8f6f4", a, b, k=32, engine="tc25x32") for a, b in EIGHT_BIT),
    *(mma("sm_120", "RTX Blackwell", "tc25x32", a, b, k=32) for a, b in EIGHT_BIT),
]


def draw(instruction, k, kind, tiles, generator):
    """Draw raw operands a [tiles, ROWS, k], b [tiles, ROWS, k] and the accumulator c [tiles, ROWS, ROWS]."""
    operands = [
        draw_operand(dtype, (tiles, ROWS, k), kind, side, generator)
        for side, dtype in enumerate((instruction.dtype, instruction.dtype_b))
    ]
    shape = (tiles, ROWS, ROWS)
    sign = generator.choice([-1.0, 1.0], shape)
    if kind == "special":
        c = generator.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    elif kind == "subnormal":
        c = sign * 2.0 ** generator.uniform(-150, -115, shape)
    elif kind == "largest":
        c = sign * np.minimum(2.0 ** generator.uniform(120, 128, shape), 2.0**128 - 2.0**104)
    else:
        values = [
            leaf.decode(x, dtype)[0] for x, dtype in zip(operands, dtypes(instruction), strict=True)
        ]
        dot = np.einsum("kti,ktj->tij", *values)  # each [k, tiles, ROWS]
        if kind == "cancelling":
            c = -dot * (1 + generator.integers(-2, 3, shape) * 2.0**-23)
        else:
            c = sign * np.abs(dot) * 2.0 ** generator.uniform(-24, 24, shape)
    c = c.astype(np.float32)
    c[generator.random(shape) < 0.1] = 0.0
    c[generator.random(shape) < 0.05] = -0.0
    return *operands, c


def dtypes(instruction):
    return instruction.dtype, instruction.dtype_b


def draw_operand(dtype, shape, kind, side, generator):
    """Draw raw patterns; `side` is 0 for a, 1 for b."""
    exponent, fraction, ignored = leaf.FORMATS[dtype]
    digits = fraction + ignored
    sign_bit, last = 1 << (exponent + digits), (1 << exponent) - 1
    one = (1 << (exponent - 1)) - 1  # the exponent field of 1.0
    reach = min(24, one - 1)
    rows = (*shape[:-1], 1)
    low, high = {
        "ordinary": (one - 4, one + 2),
        "wide": (one - reach, one + reach),
        "cancelling": (one - 2, one + 2),
        "subnormal": (0, 0),
        "largest": (one + one // 2 - 2, one + one // 2 + 1),
        "special": (one - 4, one + 2),
    }[kind]
    if kind == "subnormal":  # products near the least normal number of fp32, if the type allows
        if side == 0:
            high = generator.choice([0, 1, 3, 12], rows)
        else:
            low = one - 16 + generator.choice([0, 10, 20], rows)
            high = low + 18
    field = generator.integers(np.clip(low, 0, last - 1), np.clip(high, 0, last - 1) + 1, shape)
    sign = generator.integers(0, 2, shape) * sign_bit
    raw = sign | field << digits | generator.integers(0, 1 << digits, shape)
    if kind == "cancelling":  # neighbours cancel: what is left is what alignment kept of the others
        flip = generator.integers(0, 2, shape) * sign_bit
        half = shape[-1] // 2 * 2
        raw[..., 1:half:2] = (raw ^ flip)[..., 0:half:2]
    if kind == "special":
        anything = generator.integers(0, sign_bit << 1, shape)
        raw = np.where(generator.random(shape) < 0.04, anything, raw)
        infinity = raw & sign_bit | last << digits  # e4m3 has none there
        raw = np.where(generator.random(shape) < 0.004, infinity, raw)
    # Zeros: few; in some rows of subnormals many, so that a subnormal accumulator is seen.
    share = generator.choice([0.05, 0.5, 1.0], rows) if kind == "subnormal" else 0.05
    raw = np.where(generator.random(shape) < share, raw & sign_bit, raw)
    return raw.astype(f"uint{1 + exponent + digits}")


def as_torch(raw, dtype):
    return torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8)).view(TORCH[dtype])


def expected(model, instruction, a, b, c):
    """The bits that the oracle returns for tiles."""
    left = as_torch(a, instruction.dtype)[:, :, None, :].expand(-1, -1, ROWS, -1)
    right = as_torch(b, instruction.dtype_b)[:, None, :, :].expand(-1, ROWS, -1, -1)
    return model.dpa(left, right, torch.from_numpy(c)).view(torch.int32).numpy().view(np.uint32)


def computed(instruction, a, b, c):
    """The bits that the leaf returns."""
    found = leaf.multiply_accumulate(
        a, b, c, instruction.engine, instruction.dtype, instruction.dtype_b
    )
    return found.view(np.uint32)
