"""Run Triton executors on a GPU and record each kernel's PTX next to the PTX that the emulator runs.

A certificate and every comparison in the PTX machine are about a PTX text. They hold for a GPU where Triton's runtime
gives that GPU the same text; ptxas is trusted from there on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from isobit.certifying.judging.static_facts import ptx_digest
from isobit.certifying.running import sass
from isobit.certifying.running.backends import compiler_for
from isobit.certifying.running.compile import (
    TARGETS,
    CompileError,
    KernelText,
    LaunchError,
    specialise,
)
from isobit.errors import IsobitError, UnsupportedError
from isobit.order.engines import ENGINE_OF_TARGET

TEXTS = ("ptx", "amdgcn")  # what Triton keeps of a kernel, by vendor


@dataclass(frozen=True)
class CardBackend:
    """Runs kernels by Triton's runtime, as without a backend, and keeps their texts.

    Attributes:
        target: The GPU, such as "sm_90".
        texts: One per launch.
    """

    target: str
    texts: list[KernelText] = field(default_factory=list, compare=False)

    @property
    def kind(self) -> str:
        """The name of this backend."""
        return "card"

    @property
    def engine(self) -> str:
        """The arithmetic of the target's matrix products; "" if it is not known."""
        return ENGINE_OF_TARGET.get(self.target, "")

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Run one kernel on the GPU of its tensors."""
        given = {**constants, **options}
        texts = run_on_card(kernel, grid, args, given)
        text = next((texts[kind] for kind in TEXTS if kind in texts), None)
        if text is None:
            raise UnsupportedError(
                expected=f"the text of {kernel.__name__}: one of {', '.join(TEXTS)}",
                received=f"a compiled kernel with {', '.join(texts) or 'nothing'}",
                remedy="report it with the version of Triton; its code cannot be compared",
            )
        found = self.beside_machine(kernel, args, given, text)
        cubin = texts.get("cubin")
        if cubin:
            code = {
                "sass": sass_digest(cubin),
                "recorded_sass": recorded(self.target, found.digest),
            }
            found = replace(found, **code)
        self.texts.append(found)

    def beside_machine(
        self, kernel: Any, args: Sequence[Any], given: Mapping[str, Any], text: str
    ) -> KernelText:
        """Return a text with the digest of what is compiled for the machine from the same call."""
        if self.target not in TARGETS:
            return KernelText(kernel.__name__, "", ptx_digest(text), "")
        call = specialise(kernel, self.target, args, given)
        try:
            known = compiler_for(self.target).compile(kernel, call).facts.digest
        except (CompileError, LaunchError):
            known = ""
        return KernelText(kernel.__name__, call.describe(), ptx_digest(text), known)


@cache
def sass_digest(cubin: bytes) -> str:
    """Return the digest of a cubin's machine code; "" if Triton's wheel has no disassembler."""
    try:
        return sass.digest_of(sass.disassemble(cubin))
    except IsobitError:
        return ""


@cache
def recorded_digests() -> dict[str, dict[str, str]]:
    """Return target -> digest of PTX -> digest of the machine code that Triton's ptxas made of it."""
    text = Path(__file__).with_name("sass.json").read_text(encoding="utf-8")
    kernels: dict[str, dict[str, str]] = json.loads(text)["kernels"]
    return kernels


def recorded(target: str, digest: str) -> str:
    """Return the digest of machine code that is recorded for a PTX text; "" if none is."""
    return recorded_digests().get(target, {}).get(digest, "")


def run_on_card(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], given: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Launch a kernel by Triton's runtime, and return the texts of the compiled kernel."""
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    with torch.cuda.device(device):
        made = kernel[grid](*args, **given)
    return made.asm  # type: ignore[no-any-return]


def ptxas_version(target: str) -> str:
    """Return what Triton's ptxas for a target says of itself; "" if there is none to ask."""
    if target not in TARGETS:
        return ""
    from triton.backends.nvidia import compiler

    try:
        said = compiler.get_ptxas_version(int(target.removeprefix("sm_")))
    except Exception:  # no such tool, or one that does not run
        return ""
    return str(said).strip().splitlines()[-1]
