"""`isobit.certify`: prove that a function's Triton kernels compute a row in one order, without a GPU."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobit import __version__
from isobit.certifying.judging.certificate import cautions, judge_target, shared_targets
from isobit.certifying.judging.configurations import Surveyed, plan
from isobit.certifying.judging.judging import shown
from isobit.certifying.judging.scan import Scanned, compare_first, first_launches, scan_and_add
from isobit.certifying.records import Certified, TargetReport, TensorRead
from isobit.certifying.report.json import certificate_as_json, plain_certificate
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import describe_certificate
from isobit.certifying.running.compile import Compiler, check_target, triton_package
from isobit.certifying.running.execution import Progress, Steps, name_of
from isobit.foundation import files
from isobit.foundation.processor import cpu_name
from isobit.foundation.records import Provenance
from isobit.report.markup import writer_of

TARGETS = ("sm_80", "sm_90", "sm_100")
WRITERS = {
    ".html": write_certificate_page,
    ".json": certificate_as_json,
    ".txt": describe_certificate,
}


@dataclass(frozen=True)
class Certificate(Certified):
    """What `isobit.certify` found; it can be printed and saved.

    Attributes:
        kept: True if on every target all rows of all configurations have one expression.
        classes: the expressions, each with the configurations that have it.
        targets: one report per target, with outcomes, static facts and where expressions differ.
        groups: targets that share one expression.
        exit_code: 0 if kept, 1 if it fails on a target, 2 if not enough ran to say.

    Example:
        >>> from isobit.ops.softmax.triton import softmax
        >>> def attend(rows):
        ...     x = torch.randn(rows, 64)
        ...     y = torch.empty_like(x)
        ...     softmax[(rows,)](x, y, rows, N=64, SEGMENTS=1, ROWS=1, enable_fp_fusion=False)
        ...     return y
        >>> found = isobit.certify(attend, rows=(2, 3), targets=("sm_80",))
        >>> found.exit_code, [report.target for report in found.targets]
        (0, ['sm_80'])
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as dictionaries, lists, strings and numbers, as the JSON has it."""
        return plain_certificate(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate to a file; its suffix decides the form: .html, .json or .txt.

        Args:
            path: The file to write; one that exists is replaced.

        Raises:
            ArgumentError: If the suffix is another one.
        """
        files.write_text(Path(path), writer_of(path, WRITERS)(self))

    def __str__(self) -> str:
        return describe_certificate(self)


def certify(
    function: Callable[..., Any],
    rows: Sequence[int] | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    targets: Sequence[str] = TARGETS,
    *,
    ptx: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Prove that a function's Triton kernels compute every output row in one order, without a GPU.

    The function is called as it is, once per configuration. Its launches are compiled for each target and the PTX is
    executed on this CPU; every value carries the name of the expression that made it. Equal names mean equal bits for
    all float inputs, so two configurations whose rows have the same names cannot differ on any of them on one GPU.

    `isobit.reveal.compare_orders` is another function: it finds the order of sums of code that it can only call.

    Args:
        function: Ordinary wrapper code: it makes tensors on the CPU, launches kernels and returns what they wrote.
            A parameter `rows` is the number of rows, that is of independent samples.
        rows: Row counts to compare. By default, if the function has `rows`, 1, 3, 16, 64, 70 and 130, and others that
            launch something else. Up to 65,536 rows are launched without being executed; if what they launch was not
            judged, the certificate says so, and is not kept unless row counts were given.
        vary: Values of other parameters of the function, such as `{"BLOCK_M": (16, 64)}`.
        targets: GPUs to compile for.
        ptx: A folder to write the PTX of every compiled kernel to.
        progress: Called with a text, the steps done and all steps.

    Returns:
        The certificate: `.kept`, `.classes`, `str()`, `.to_dict()`, `.save("page.html")`.

    Raises:
        ArgumentError: If the function raises, launches nothing, or lacks a parameter.
        EngineError: If triton is not installed.

    Example:
        >>> from isobit.ops.softmax.triton import softmax
        >>> def attend(rows):
        ...     x = torch.randn(rows, 64)
        ...     y = torch.empty_like(x)
        ...     softmax[(rows,)](x, y, rows, N=64, SEGMENTS=1, ROWS=1, enable_fp_fusion=False)
        ...     return y
        >>> found = isobit.certify(attend, rows=(1, 3), targets=("sm_80",))
        >>> found.kept, len(found.classes)
        (True, 1)
    """
    began = time.perf_counter()
    triton = triton_package()
    targets = tuple(dict.fromkeys(check_target(target) for target in targets))
    plans = plan(function, rows, vary or {})
    notes: list[str] = []
    unjudged: list[str] = []
    unsettled: list[str] = []
    scanned = Scanned()
    found = list[TargetReport]()
    tensors: tuple[TensorRead, ...] = ()
    steps = Steps(progress)
    for at, target in enumerate(targets):
        first = first_launches(function, target, plans) if at == 0 else {}
        surveyed = Surveyed(function, target, plans).survey()
        scanned = scan_and_add(surveyed, add=rows is None)
        notes += [note for note in scanned.remarks if note not in notes]
        scanned.unsettled += compare_first(surveyed, first)
        unjudged += [text for one in scanned.unjudged if (text := str(one)) not in unjudged]
        unsettled += [text for one in scanned.unsettled if (text := str(one)) not in unsettled]
        steps.expect(len(surveyed.expanded), len(targets) - at - 1)
        compiler = Compiler(target, progress=steps.tell)
        tensors = tensors or surveyed.tensors()
        found.append(judge_target(surveyed, compiler, steps, notes, unjudged))
        if ptx is not None:
            write_ptx(Path(ptx), compiler)
    reports = tuple(found)
    return Certificate(
        function=name_of(function),
        targets=reports,
        rows=tuple(dict.fromkeys(one.rows for one in plans if one.rows is not None)),
        vary=tuple((name, tuple(map(shown, values))) for name, values in (vary or {}).items()),
        tensors=tensors,
        groups=shared_targets(reports),
        rows_given=rows is not None,
        scanned=tuple(dict.fromkeys(scanned.counts)),
        unjudged=tuple(unjudged),
        unsettled=tuple(unsettled),
        notes=(*notes, *cautions(reports)),
        triton=str(triton.__version__),
        seconds=time.perf_counter() - began,
        provenance=origin_of(f"isobit.certify({name_of(function)})", reports),
    )


def write_ptx(folder: Path, compiler: Compiler) -> None:
    """Write the PTX of every kernel that was compiled."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in compiler.done.values():
        name = f"{made.name}-{compiler.target}-{made.facts.digest[:12]}.ptx"
        files.write_text(folder / name, made.ptx)


def origin_of(command: str, reports: Sequence[Any]) -> Provenance:
    """Return the provenance of a certificate that Python code asked for."""
    digests = [one.digest for report in reports for one in report.classes]
    return Provenance(
        isobit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=cpu_name(),
        engine=", ".join(dict.fromkeys(report.engine for report in reports)),
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        digest=" ".join(digests)[:64],
    )
