"""The machine code of NVIDIA's GPUs: what ptxas makes of a kernel's PTX, read by the tools in Triton's wheel.

[Note: what ptxas may change]
Certificates and comparisons in the PTX machine are about PTX. ptxas could still fuse a product and a sum, which rounds
once instead of twice. isobit's kernels are compiled with --fmad=false, and the machine code shows whether ptxas obeys;
a certificate of a kernel whose products and sums are open to fusion needs that nothing was fused. An FFMA there has
one of three origins: an fma of the PTX; a division or a square root, which are sequences with FFMA; or a product and a
sum that ptxas fused. To tell them apart, the fma of the PTX are marked: they get another rounding (.rz), which machine
code shows (FFMA.RZ) and which ptxas has no reason to give to an FFMA of its own. What is then left without a mark must
be exactly as many as the divisions and roots have. The code without the marks must be that of the PTX, instruction for
instruction, so that what is shown of the marked text holds for the code that runs.
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
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "QGMMA", "IMMA")
MARKED = re.compile(r"\bfma\.rn(?=\.(?:ftz\.|sat\.)*(?:f32|f32x2|f64)\b)")
MARK = re.compile(r"^((?:FFMA2?|FHFMA|DFMA)\b\S*)\.RZ\b", re.MULTILINE)
ROUNDED = re.compile(r"^(?:FFMA2?|FHFMA|DFMA)\b(?!\S*\.R[MPZ]\b)", re.MULTILINE)  # to nearest
SUBROUTINE = "\n$__internal_"  # the label of ptxas' own subroutines, which follow a kernel
# FFMA to nearest in ptxas' sequence for a division and a square root in fp32, by the subroutine that it calls if an
# operand is subnormal or huge.
SEQUENCES = {"div_rn_noftz_f32_slowpath": 5, "sqrt_rn_f32_slowpath": 2}
TIMEOUT = 300  # seconds of one call of a tool
APART = ("--fmad=false",)
AS_TRITON = ("--regAllocOptLevel=2",)  # with enable_fp_fusion, its default


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


def assemble(ptx: str, target: str, options: tuple[str, ...] = APART) -> bytes:
    """Return the cubin that ptxas makes of a PTX text for a target, by default as Triton does without fusion."""
    number = int(target.removeprefix("sm_"))
    name = "ptxas-blackwell" if number >= 100 else "ptxas"
    arch = f"{target}a" if number >= 90 else target
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(ptx)
        command = [tool(name), *options, f"--gpu-name={arch}", str(text), "-o", str(out)]
        run(command)
        return out.read_bytes()


def disassemble(cubin: bytes) -> str:
    """Return the instructions of a cubin, one per line, without addresses and debug information."""
    return instructions(listing(cubin))


def listing(cubin: bytes) -> str:
    """Return what nvdisasm prints of a cubin's code: instructions, addresses, and labels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return run([tool("nvdisasm"), "-c", "-ndf", str(path)])


def instructions(said: str) -> str:
    """Return the instructions of a listing, one per line, without addresses, labels and predicates."""
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


def fuses(ptx: str, target: str, said: str, options: tuple[str, ...] = APART) -> bool:
    """Return whether machine code has a fused product and sum, of fp32 or fp64, that its PTX has apart.

    It is also True where the two cannot be told apart.

    Args:
        ptx: The PTX text of a kernel.
        target: The GPU, such as "sm_90".
        said: The listing of its machine code.
        options: What ptxas was called with.
    """
    marked = MARKED.sub("fma.rz", ptx)
    other = said if marked == ptx else listing(assemble(marked, target, options))
    if MARK.sub(r"\1", instructions(other)) != MARK.sub(r"\1", instructions(said)):
        return True
    code = instructions(other.split(SUBROUTINE)[0])
    calls = re.findall(r"^CALL\S* `\(\$__internal_\d+_\$__cuda_sm\w+?_(\w+)\)$", code, re.MULTILINE)
    return len(ROUNDED.findall(code)) != sum(SEQUENCES.get(name, 0) for name in calls)


def count_products(ptx: str) -> int:
    """Return how many matrix instructions a PTX text has."""
    return len(
        re.findall(r"^\s*(?:@%?\w+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx, re.M)
    )
