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
from isobit.certifying.running import sass
from isobit.errors import IsobitError
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
    opened = count_open_products(statements) if fusion_allowed else 0
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
        open_products=opened,
        ptxas_fuses=has_fused(ptx, target, cubin) if opened and cubin is not None else None,
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
    loose, moved = list[tuple[str, list[str]]](), list[list[str]]()
    for opcode, operands in statements:
        stem = opcode.split(".")[0]
        registers = _REGISTER.findall(operands)
        if stem in ("mov", "selp") and registers:
            moved.append(operand_groups(operands))
        elif is_float(opcode) and stem in ("mul", "add", "sub") and not rounds(opcode):
            loose.append((stem, registers))
    products = {registers[0] for stem, registers in loose if stem == "mul"}
    while True:  # moves, packs of pairs and loops carry a product on
        carried = {
            target
            for targets, *sources in ([g.split() for g in groups] for groups in moved)
            for source in sources
            if products & set(source)
            for target in targets
        }
        if carried <= products:
            break
        products |= carried
    return sum(
        bool(products & set(registers[1:])) for stem, registers in loose if stem in ("add", "sub")
    )


def rounds(opcode: str) -> bool:
    """Tell whether an instruction names its rounding, so that it is not fused."""
    return any(mode in opcode for mode in ROUNDED)


def operand_groups(operands: str) -> list[str]:
    """Return the registers of each operand, those of a vector together: "{%r1, %r2}, %rd3" is two operands."""
    parts = re.split(r",(?![^{]*})", operands)
    return [" ".join(_REGISTER.findall(part)) for part in parts]


def has_fused(ptx: str, target: str, cubin: bytes) -> bool | None:
    """Return whether ptxas fused a product and a sum that the PTX leaves open, or None if it cannot be read."""
    try:
        said = sass.listing(cubin)
        if sass.fuses(ptx, target, said, sass.AS_TRITON):
            return True
    except (IsobitError, OSError, subprocess.SubprocessError):
        return None
    halves = re.findall(r"^HFMA2\b(.*)", sass.instructions(said), re.MULTILINE)
    made = sum("-RZ, RZ" not in rest for rest in halves)  # a constant is moved by HFMA2 of zeros
    statements = _STATEMENT.findall(re.sub(r"//[^\n]*", "", ptx))
    return made != sum(is_half(opcode) for opcode, _ in statements if opcode.startswith("fma."))


def is_half(opcode: str) -> bool:
    """Tell whether an instruction computes in 16 bits: `fma.rn.f32.bf16` widens its operands."""
    return opcode.endswith(("f16", "f16x2")) and ".f32" not in opcode


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
    said = run_tool("cuobjdump", "-res-usage", cubin)
    if said is None:
        return None, None
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    return (int(registers[1]) if registers else None), (int(stack[1]) if stack else None)


def run_tool(name: str, option: str, cubin: bytes) -> str | None:
    """Return what a tool of Triton's wheel prints about machine code, or None if it fails."""
    tool = _tool(name)
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            return subprocess.run(
                [str(tool), option, file.name],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return None


def _tool(name: str) -> Path | None:
    import triton

    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return found if found.is_file() else None
