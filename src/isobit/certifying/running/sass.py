"""The machine code of NVIDIA's GPUs: what ptxas makes of a kernel's PTX, read by the tools in Triton's wheel.

[Note: what ptxas may change]
Certificates and comparisons in the PTX machine are about PTX. ptxas could still fuse a product and a sum, which rounds
once instead of twice. Triton calls it with --fmad=false, and the machine code shows whether it obeys: apart from
divisions and square roots, which are sequences of FFMA in machine code, a kernel has FFMA only if its PTX has fma.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from blake3 import blake3

from isobit.errors import EngineError, UnsupportedError

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
FUSED = ("FFMA", "FFMA2", "DFMA")  # HFMA2 with zeros is how constants are moved
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "QGMMA", "IMMA")
# Instructions of PTX that are sequences with FFMA in machine code, and something of the same shape that is not.
DIVISIONS = (
    (re.compile(r"\bdiv\.(?:rn|full)\.f32\b"), "mul.rn.f32"),
    (re.compile(r"\bsqrt\.rn\.f32\b"), "neg.f32"),
)
TIMEOUT = 300  # seconds of one call of a tool


def tool(name: str) -> str:
    """Return the path of a tool in Triton's wheel.

    Raises:
        EngineError: If it is not there.
    """
    from triton.backends import nvidia

    path = Path(nvidia.__file__).parent / "bin" / name
    if not path.is_file():
        raise EngineError(
            expected=f"{name} in Triton's wheel",
            received=f"no {path.name} there",
            remedy="pip install triton from PyPI (Linux), whose wheel has NVIDIA's tools",
        )
    return str(path)


def assemble(ptx: str, target: str) -> bytes:
    """Return the cubin that ptxas makes of a PTX text for a target, with Triton's options."""
    number = int(target.removeprefix("sm_"))
    name = "ptxas-blackwell" if number >= 100 else "ptxas"
    arch = f"{target}a" if number >= 90 else target
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(ptx)
        command = [tool(name), "--fmad=false", f"--gpu-name={arch}", str(text), "-o", str(out)]
        run(command)
        return out.read_bytes()


def disassemble(cubin: bytes) -> str:
    """Return the instructions of a cubin, one per line, without addresses and debug information."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = run([tool("nvdisasm"), "-c", str(path)])
    found = [f"{name}{rest}".strip() for name, rest in INSTRUCTION.findall(said)]
    if not found:
        raise UnsupportedError(
            expected="instructions in a cubin",
            received="none that nvdisasm shows",
            remedy="report it with the version of Triton",
        )
    return "\n".join(re.sub(r"\s+", " ", line) for line in found)


def run(command: list[str]) -> str:
    """Run a tool and return what it prints."""
    made = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if made.returncode:
        raise UnsupportedError(
            expected=f"{Path(command[0]).name} to accept a kernel",
            received=made.stderr.strip()[-300:] or f"exit code {made.returncode}",
            remedy="report it with the version of Triton",
        )
    return made.stdout


def digest_of(sass: str) -> str:
    """Return the digest of machine code as `disassemble` returns it."""
    return blake3(sass.encode()).hexdigest()[:32]


def count(sass: str, kinds: tuple[str, ...]) -> int:
    """Return how many instructions are of some kinds."""
    names = Counter(line.split(" ", 1)[0].split(".", 1)[0] for line in sass.splitlines())
    return sum(names[kind] for kind in kinds)


def fuses(ptx: str, target: str) -> bool:
    """Return whether ptxas fuses a product and a sum that a PTX text has apart."""
    if re.search(r"\bfma\.", ptx):  # written as fused
        return False
    for pattern, other in DIVISIONS:
        ptx = pattern.sub(other, ptx)
    return count(disassemble(assemble(ptx, target)), FUSED) > 0


def count_products(ptx: str) -> int:
    """Return how many matrix instructions a PTX text has."""
    return len(
        re.findall(r"^\s*(?:@%?\w+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx, re.M)
    )
