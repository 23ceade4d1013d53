"""What can be read from a compiled kernel without running it: instructions by kind, registers, spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from isobit.certifying.records import KernelFacts
from isobit.order.engines import ENGINE_OF_TARGET

FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
ROUNDED = (".rn", ".rz", ".rm", ".rp", ".rna")
_STATEMENT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"%[a-z]+\d+")


def facts_of(
    ptx: str,
    *,
    kernel: str,
    target: str,
    options: str,
    shared_bytes: int,
    fusion_allowed: bool,
    cubin: bytes | None = None,
) -> KernelFacts:
    """Return the static facts of a kernel; registers and spills only if there is a cubin."""
    statements = _STATEMENT.findall(re.sub(r"//[^\n]*", "", ptx))
    counts = Counter(opcode for opcode, _ in statements)
    tensor = {o: n for o, n in counts.items() if is_tensor_core(o)}
    atomics = {o: n for o, n in counts.items() if o.split(".")[0] in ("atom", "red", "multimem")}
    registers, spills = (None, None) if cubin is None else resources_of(cubin)
    return KernelFacts(
        kernel=kernel,
        target=target,
        options=options,
        digest=ptx_digest(ptx),
        engine=ENGINE_OF_TARGET[target] if tensor else "",
        tensor_core=tensor,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=shared_bytes,
        atomics=atomics,
        float_atomics=sum(n for o, n in atomics.items() if o.split(".")[-1] in FLOATS),
        flushes={o: n for o, n in counts.items() if ".ftz" in o},
        fused=sum(n for o, n in counts.items() if o.startswith("fma.") and is_float(o)),
        fusion_allowed=fusion_allowed,
        open_products=count_open_products(statements) if fusion_allowed else 0,
        approximate={
            o: n for o, n in counts.items() if ".approx" in o or o.startswith(("tanh.", "div.full"))
        },
        lines=ptx.count("\n") + 1,
    )


def is_float(opcode: str) -> bool:
    """Tell whether an instruction computes with floats."""
    return opcode.split(".")[-1] in FLOATS


def is_tensor_core(opcode: str) -> bool:
    """Tell whether an instruction multiplies tiles."""
    return (
        opcode.startswith(("mma.", "wgmma.mma_async", "tcgen05.mma"))
        and ".sp." not in opcode.split("mma")[0]
    )


def count_open_products(statements: Iterable[tuple[str, str]]) -> int:
    """Count products that ptxas may still fuse with a sum.

    An addition or product without a rounding modifier "may be optimized aggressively", which includes fusing the two
    (PTX ISA, floating-point instructions, `add` and `mul`). Triton writes them without a modifier unless
    `enable_fp_fusion=False`.
    """
    products, found = set[str](), 0
    for opcode, operands in statements:
        stem = opcode.split(".")[0]
        if not is_float(opcode) or any(mode in opcode for mode in ROUNDED):
            continue
        registers = _REGISTER.findall(operands)
        if stem == "mul" and registers:
            products.add(registers[0])
        elif stem in ("add", "sub"):
            found += any(register in products for register in registers[1:])
    return found


def ptx_digest(ptx: str) -> str:
    """Return the digest of a PTX text without comments, debug lines and file names."""
    body = re.sub(r"//[^\n]*", "", ptx)
    body = body[: body.index(".section")] if ".section" in body else body
    kept = [
        line
        for line in body.splitlines()
        if line.strip() and not line.lstrip().startswith((".loc", ".file"))
    ]
    return blake3("\n".join(kept).encode()).hexdigest()[:32]


def resources_of(cubin: bytes) -> tuple[int | None, int | None]:
    """Return registers per thread and bytes of stack per thread (where spills go), by cuobjdump; None if it fails."""
    tool = _tool("cuobjdump")
    if tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            said = subprocess.run(
                [str(tool), "-res-usage", file.name],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return None, None
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    return (int(registers[1]) if registers else None), (int(stack[1]) if stack else None)


def _tool(name: str) -> Path | None:
    import triton

    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return found if found.is_file() else None
