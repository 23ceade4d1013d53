"""The list of benchmarks/leaf_cases.py has every matrix instruction that Triton emits for tl.dot on every target.

Types: bf16, fp16, fp32 as tf32, fp8; tiles of 16, 64 and 128 rows. The machine refuses other instructions by name.
"""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.leaf_cases import INSTRUCTIONS

TARGETS = {f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "tf32", "fp8e4nv": "e4m3", "fp8e5": "e5m2"}
NO_TYPE = {("sm_80", "fp8e4nv")}  # Triton has no fp8e4nv there
MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma)([\w.:]*)")


@triton.jit
def dot(A, B, C, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * M + m[None, :])
    tl.store(C + m[:, None] * M + m[None, :], tl.dot(a, b))


def emitted(target, dtype, rows):
    """Names of matrix instructions, as the list writes them."""
    source = ASTSource(
        fn=dot,
        signature={
            "A": f"*{dtype}",
            "B": f"*{dtype}",
            "C": "*fp32",
            "M": "constexpr",
            "K": "constexpr",
        },
        constexprs={(3,): rows, (4,): 64},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    asm = triton.compile(source, target=TARGETS[target]).asm
    for stem, rest in MATRIX.findall(asm.get("ptx") or asm["amdgcn"]):
        if stem == "tcgen05.mma":  # types are in a descriptor
            kind = re.search(r"kind::\w+", rest)[0]
            name = f"{kind}.f32.{TYPES[dtype]}.{TYPES[dtype]}"
        else:
            name = re.sub(r"^\.(sync\.)?aligned\.|\.row\.col", "", rest)
        yield f"{stem.replace('.mma_async', '')} {name}" if stem != "v_mfma" else stem + rest


@pytest.mark.full
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_emitted_instruction_is_listed(target, dtype):
    if (target, dtype) in NO_TYPE:
        with pytest.raises(triton.CompilationError):
            list(emitted(target, dtype, 16))
        return
    listed = {i.name for i in INSTRUCTIONS if i.target == target}
    for rows in (16, 64, 128):
        found = set(emitted(target, dtype, rows))
        assert found
        assert found <= listed
