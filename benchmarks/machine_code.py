"""The machine code of every kernel that an attestation launches: what ptxas and LLVM made of roundings and products.

`python -m benchmarks machine_code` reads it and prints how many kernels are at fault; minutes.

    python -m benchmarks.machine_code sm_80 sm_90

compiles the kernels of all operators in bf16 for the targets named, and writes the digests of their machine code to
src/isobit/certifying/running/sass.json. The file says which ptxas made them. A kernel whose code is not the same when
ptxas makes it again is left out: ptxas 13.1 gives kernels with tcgen05 other uniform registers from run to run.
"""

import json
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from triton.compiler import compile as triton_compile

from isobit import bits
from isobit.certifying.running import card, sass
from isobit.certifying.running.backends import compiler_for
from isobit.certifying.running.card import ptxas_version
from isobit.certifying.running.compile import gpu_target, source_of, specialise
from isobit.foundation import backends
from isobit.ops.gpu import shipped_forms
from isobit.ops.gpu.attestation import attest_operator
from isobit.ops.gpu.executors import OPERATORS

FILE = Path(card.__file__).with_name("sass.json")
NVIDIA = ("sm_80", "sm_90", "sm_100")
AMD, AMD_OPERATORS = "gfx942", ("linear", "attention", "rms_norm", "silu")
# A sum of fp32 and widened bf16 (sub.rn.f32.bf16, sm_100) is one in fp32. HFMA2 also moves constants.
NARROW = re.compile(r"\b(?:add|sub|mul|fma)\.(?:(?:rn|ftz|sat|relu|oob)\.)*b?f16(?:x2)?\b")
UNROUNDED = re.compile(r"\b(?:add|sub|mul)\.(?:ftz\.|sat\.)*(?:f32|f32x2|f64)\b")
DOT = re.compile(r"tt\.dot .*kWidth = (\d+)\}>> \* .*kWidth = (\d+)\}>>")
# A lane has k in order if it has four 16-bit products of an instruction of 16 or 8, or one of fp32.
IN_ORDER = {torch.bfloat16: "4", torch.float32: "1"}
APPROXIMATE = re.compile(r"\bv_(?:exp|log|rsq|sin|cos)_f32|\bv_mad_f32")
FUSED = re.compile(r"\bv_(?:pk_)?fma(?:c|mk|ak)?_f32")
DIVISION = re.compile(r"\bv_div_(?:scale|fmas|fixup)_f32|v_sqrt_f32|v_rcp_f32")


class Calls:
    """A backend that keeps each kernel's first call for a target, specialised, and runs nothing."""

    kind, engine = "calls", ""

    def __init__(self, target):
        self.target, self.found = target, {}

    def launch(self, kernel, grid, args, constants, options):
        """Keep one call."""
        call = specialise(kernel, self.target, args, {**constants, **options})
        call.bound.clear()
        self.found.setdefault((kernel.fn.__module__, kernel.__name__, *call.key), (kernel, call))


def attested_calls(target, operators=OPERATORS, dtype=torch.bfloat16):
    """Return (kernel, call) of every binary that the attestation of operators uses; nothing is computed."""
    backend = Calls(target)
    with ExitStack() as stack:
        for place, name, other in (
            (bits, "equal", lambda left, right: True),
            (shipped_forms, "exact", lambda s, left, right, _: torch.zeros(len(left), len(right))),
            (shipped_forms.Products, "__call__", lambda _, left, right: torch.zeros(len(right))),
        ):
            stack.enter_context(mock.patch.object(place, name, other))
        stack.enter_context(backends.use(backend))
        for operator in operators:
            found = attest_operator(operator, dtype, torch.device("cpu"))
            assert found.kept, found
    return list(backend.found.values())


@dataclass
class Examined:
    """What was read in the kernels of a target.

    Attributes:
        made: digests of the texts that were examined.
        products: kernels with matrix products.
        written: kernels whose text has a fused product and sum.
        known: NVIDIA: kernels whose machine code is recorded, and equal to it.
        faults: what is wrong, with the kernel's name.
    """

    target: str
    made: set[str] = field(default_factory=set)
    products: int = 0
    written: int = 0
    known: int = 0
    faults: list[str] = field(default_factory=list)

    def expect(self, holds, kernel, what):
        """Note a fault unless something holds."""
        if not holds:
            self.faults.append(f"{self.target}, {kernel}: {what}")


def examine(target, operators=OPERATORS):
    """Read every kernel that an attestation of operators launches on an NVIDIA GPU in bf16."""
    found = Examined(target)
    for kernel, call in attested_calls(target, operators):
        made = compiler_for(target).compile(kernel, call)
        if made.facts.digest not in found.made:
            found.made.add(made.facts.digest)
            examine_ptx(found, kernel.__name__, made.ptx, made.facts.digest)
    return found


def examine_ptx(found, name, ptx, digest):
    """Compare a kernel's machine code with its PTX."""
    found.expect(not UNROUNDED.search(ptx), name, "the PTX has operations that ptxas may fuse")
    found.expect(not NARROW.search(ptx), name, "the PTX has sums or products of 16 bits")
    said = sass.listing(sass.assemble(ptx, found.target))
    found.expect(not sass.fuses(ptx, found.target, said), name, "ptxas fused a product and a sum")
    code = sass.instructions(said)
    wanted = bool(sass.count_products(ptx))
    has = bool(sass.count(code, sass.MATRIX))
    found.expect(has == wanted, name, "matrix products are not where the PTX has them")
    recorded = card.recorded(found.target, digest)
    same = recorded in ("", sass.digest_of(code))
    found.expect(same, name, "the machine code is not the recorded one")
    found.products += wanted
    found.known += bool(recorded)
    found.written += "fma." in ptx


def examine_amd(dtype):
    """Read the kernels of products, norms and elements for gfx942."""
    found = Examined(f"{AMD} {str(dtype).removeprefix('torch.')}")
    for number, (kernel, call) in enumerate(attested_calls(AMD, AMD_OPERATORS, dtype)):
        made = triton_compile(
            source_of(kernel, call), target=gpu_target(AMD), options=call.options.__dict__
        )
        found.made.add(str(number))
        examine_amdgcn(found, kernel.__name__, made.asm["ttgir"], made.asm["amdgcn"], dtype)
    return found


def examine_amdgcn(found, name, text, code, dtype):
    """Compare an AMD kernel's assembly with what Triton made of its source."""
    widths = {width for pair in DOT.findall(text) for width in pair}
    found.expect(widths <= {IN_ORDER[dtype]}, name, f"k is not ascending: kWidth {widths}")
    found.expect(not APPROXIMATE.search(code), name, "an approximate instruction")
    own = "math.fma" in text or "tt.extern_elementwise" in text
    allowed = own or DIVISION.search(code) or (widths and dtype == torch.float32)
    found.expect(allowed or not FUSED.search(code), name, "LLVM fused a product and a sum")
    found.products += bool(widths)
    found.written += own


def run(quick, threads, dtypes):
    """Read all kernels; return 1 if one is at fault."""
    console, faults = Console(highlight=False, width=160), []
    table = Table(
        "target",
        "kernels",
        "with matrix products",
        "with an fma of their own",
        "recorded, and equal",
        "at fault",
    )
    targets = [examine(target) for target in (NVIDIA[1:2] if quick else NVIDIA)]
    targets += [examine_amd(dtype) for dtype in IN_ORDER]
    for one in targets:
        known = "" if one.target.startswith(AMD) else str(one.known)
        counts = (len(one.made), one.products, one.written)
        table.add_row(one.target, *map(str, counts), known, str(len(one.faults)))
        faults += one.faults
    console.print(table)
    for text in faults:
        console.print(text)
    total = sum(len(one.made) for one in targets)
    console.print(f"{len(faults)} faults in {total} kernels")
    return int(bool(faults) or not total)


def record(target, operators=OPERATORS):
    """Return digest of PTX -> digest of machine code."""
    found = {}
    for kernel, call in attested_calls(target, operators):
        made = compiler_for(target).compile(kernel, call)
        cubins = {sass.assemble(made.ptx, target) for _ in range(2)}
        codes = {sass.disassemble(cubin) for cubin in cubins}
        changes = len(codes) > 1 or any(sass.count(code, ("UTCHMMA",)) for code in codes)
        shown = "left out" if changes else sass.digest_of(codes.pop())
        if not changes:
            found[made.facts.digest] = shown
        print(target, kernel.__name__, shown, flush=True)
    return found


def main(targets):
    known = json.loads(FILE.read_text())
    for target in targets:
        known.setdefault("ptxas", {})[target] = ptxas_version(target)
        known["kernels"][target] = record(target)
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
