"""Frozen records that cross layers, and their JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Where two tensors part: in `what` (dtype, shape or bits), and for bits at which element first."""

    what: str
    left: str
    right: str
    index: tuple[int, ...] | None = None
    ulps: int | None = None
    count: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        if self.what != "bits":
            return f"{self.what} differ: {self.left} and {self.right}"
        apart = "not comparable" if self.ulps is None else f"{self.ulps} ulp apart"
        return (
            f"{self.count} of {self.total} elements differ, first at {list(self.index or ())}: "
            f"{self.left} and {self.right}, {apart}"
        )


@dataclass(frozen=True)
class Attestation:
    """What one engine was found to do, against what the order says."""

    dtype: str
    engine: str
    kept: bool
    checks: int
    detail: str


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the software that numbers come from."""

    cpu: str
    capability: str
    cores: int
    threads: int
    python: str
    torch: str
    onednn: bool
    flags: str
    order_version: int


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check, with its denominator; `kept` needs at least one comparison."""

    subject: str
    check: str
    compared: int
    differing: int
    first: str = ""

    @property
    def kept(self) -> bool:
        """Nothing differed, and something was compared."""
        return self.compared > 0 and self.differing == 0


def to_json(value: Any) -> str:
    """A record, or a container of records, as JSON."""
    return json.dumps(value, default=_plain, indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return plain | ({"kept": value.kept} if isinstance(value, Verdict) else {})
    raise TypeError(f"no JSON form for {type(value).__name__}")
