"""Registers, spills and shared memory of a launch's binary, by ptxas or from AMD's assembly; no GPU is needed."""

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

from benchmarks.records import ROOT
from isobit.certifying.judging.static_facts import resources_of
from isobit.certifying.running.compile import AMD_TARGETS, SHARED_LIMIT, gpu_target, source_of

# Bytes of the LDS that one program may have: AMD's instruction set guides of CDNA3, CDNA4 and RDNA3.
LDS_LIMIT = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1100": 64 << 10}
LIMITS = SHARED_LIMIT | LDS_LIMIT
KEPT = ROOT / "build" / "kernels"  # what was measured, by source, sizes, options and target


@dataclass(frozen=True)
class Resources:
    """What one thread and one program of a binary need.

    Attributes:
        registers: Per thread; on AMD vector registers, accumulation registers included.
        spills: Bytes per thread that are stored because registers ran out.
        stack: Bytes per thread of local memory, spills included; the slow path of a division has some.
        shared: Bytes of shared memory (LDS) per program.
    """

    registers: int
    spills: int
    stack: int
    shared: int


def measure(launch, target, only_kept=False):
    """Return the resources of a launch's binary, kept ones if there are any; None if `only_kept` and there are none."""
    import triton

    source, options = source_of(launch.kernel, launch.call), launch.call.options
    key = f"{source.hash()} {options.hash()} {target} {triton.__version__}"
    file = KEPT / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if file.is_file():
        return Resources(**json.loads(file.read_text()))
    if only_kept:
        return None
    found = measure_source(source, options, target)
    KEPT.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(found)))
    return found


def measure_source(source, options, target):
    """Compile a kernel and return its resources."""
    from triton.compiler import compile as triton_compile

    made = triton_compile(source, target=gpu_target(target), options=options.__dict__)
    shared = int(made.metadata.shared)
    if target in AMD_TARGETS:
        return read_assembly(made.asm["amdgcn"], shared)
    registers, stack = resources_of(made.asm["cubin"])
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump says nothing about {source.name} for {target}")
    spills = count_spills(made.asm["ptx"], target) if stack else 0
    return Resources(registers, spills, stack, shared)


def count_spills(ptx, target):
    """Return the bytes that ptxas spills, with the options that Triton gives it and `enable_fp_fusion=False`."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    number = int(target.removeprefix("sm_"))
    with tempfile.NamedTemporaryFile(mode="w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [get_ptxas(number).path, "-lineinfo", "--fmad=false", "-v", "--regAllocOptLevel=2"]
        words += [f"--gpu-name={sm_arch_from_capability(number)}", file.name, "-o", "/dev/null"]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stderr
    return max(int(found) for found in re.findall(r"(\d+) bytes spill", said))


def read_assembly(text, shared):
    """Return the resources that AMD's assembly states in its metadata."""

    def value(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

    spilled = 4 * value("vgpr_spill_count")
    registers = max(value("vgpr_count"), 0)
    return Resources(registers, spilled, value("private_segment_fixed_size"), shared)
