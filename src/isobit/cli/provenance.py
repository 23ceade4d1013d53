"""The provenance of a report: versions, machine, command, time and digest. Does not load torch."""

from __future__ import annotations

import argparse
import datetime
import platform
import shlex
from collections.abc import Iterable

from isobit import __version__
from isobit.contracts.store.sources import hash_text, installed_version, machine
from isobit.foundation.processor import cpu_name
from isobit.foundation.records import Provenance


def provenance_of(options: argparse.Namespace, judged: Iterable[str]) -> Provenance:
    """Return the provenance of the running command; `judged` are digests of what it judged."""
    return Provenance(
        isobit=__version__,
        torch=installed_version("torch"),
        python=platform.python_version(),
        cpu=cpu_name(),
        engine=machine(),
        command=shlex.join(["isobit", *options.words]),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        digest=hash_text(*judged)[:32],
    )
