"""`Report`: what `isobit.audit` returns. It can be printed and saved."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from isobit import __version__
from isobit.auditing.records import Audit
from isobit.auditing.report.json import audit_as_json
from isobit.auditing.report.page import write_audit_page
from isobit.auditing.report.sarif import audit_as_sarif
from isobit.auditing.report.text import describe_audit
from isobit.foundation import files
from isobit.foundation.machine import fingerprint
from isobit.foundation.processor import cpu_name
from isobit.foundation.records import Provenance
from isobit.order.plan import VERSION
from isobit.report.forms import writer_of

WRITERS = {
    ".html": write_audit_page,
    ".json": audit_as_json,
    ".sarif": audit_as_sarif,
    ".txt": describe_audit,
}


@dataclass(frozen=True)
class Report(Audit):
    """What an audit found, as `isobit.audit` returns it.

    Attributes:
        guilty: operators that give other bits for the same inputs, the largest share of its axis's effect first.
        unjudged: operators without a verdict, each with the reason.
        complete: True if on every axis the run with all guilty operators substituted is the variant, bit for bit.
        effect: how far results differ, by axis.
        kept: True if operators were judged on every axis, none is guilty, and the list is complete.
        axes: one record per axis, with counts and times.

    Example:
        >>> import torch, isobit
        >>> layer = isobit.nn.Linear(16, 4)
        >>> report = isobit.audit(layer, torch.randn(3, 5, 16), vary=("batch",))
        >>> report.kept, report.guilty, report.axes[0].judged
        (True, (), 1)
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file; its suffix decides the form: .html, .json, .sarif or .txt.

        Args:
            path: The file to write; one that exists is replaced.

        Raises:
            ArgumentError: If the suffix is another one.

        Example:
            >>> import tempfile, torch, isobit
            >>> report = isobit.audit(isobit.nn.Linear(8, 4), torch.randn(2, 8), vary=("repeat",))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/audit.html")
        """
        files.write_text(Path(path), writer_of(path, WRITERS)(self))

    def __str__(self) -> str:
        return describe_audit(self)


def origin_of(command: str, judged: str) -> Provenance:
    """Return the provenance of an audit that Python code asked for."""
    machine = fingerprint(VERSION)
    return Provenance(
        isobit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cpu=cpu_name(),
        engine=f"{machine.capability}, {machine.threads} threads",
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        digest=judged,
    )
