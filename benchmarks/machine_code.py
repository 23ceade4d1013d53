"""The machine code of every kernel that an attestation launches: recorded digests, by which a card's are compared.

    python -m benchmarks.machine_code sm_80 sm_90

compiles the kernels of all operators in bf16 for the targets named, and writes the digests of their machine code to
src/isobit/certifying/running/sass.json. The file says which ptxas made them. A kernel whose code is not the same when
ptxas makes it again is left out: ptxas 13.1 gives kernels with tcgen05 other uniform registers from run to run.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch

from isobit import bits
from isobit.certifying.running import card, sass
from isobit.certifying.running.backends import compiler_for
from isobit.certifying.running.card import ptxas_version
from isobit.certifying.running.compile import specialise
from isobit.foundation import backends
from isobit.ops.gpu import shipped_forms
from isobit.ops.gpu.attestation import attest_operator
from isobit.ops.gpu.executors import OPERATORS

FILE = Path(card.__file__).with_name("sass.json")


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
