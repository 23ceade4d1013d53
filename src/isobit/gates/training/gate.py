"""The verdict over layouts: one loss curve and one digest, or which layouts part and by how much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from isobit.files import write_text
from isobit.gates.training.code import code_digest
from isobit.gates.training.digest import Curve
from isobit.gates.training.launch import Job, run_job
from isobit.gates.training.layouts import Layout


@dataclass(frozen=True)
class Outcome:
    """A layout that ran."""

    layout: Layout
    dtype: str
    stock: bool
    transport: str
    curve: Curve
    seconds: float

    @property
    def name(self) -> str:
        """As tables call it: what trains, and data × micro × tensor."""
        plain = "stock" if self.stock else "isobit"
        engine = plain if self.layout.engine == "isobit" else f"{plain} {self.layout.engine}"
        return f"{engine} {self.layout.data}×{self.layout.micro}×{self.layout.tensor}"


@dataclass(frozen=True)
class Verdict:
    """Of one side (isobit's or stock's) in one dtype; layouts are compared with the first."""

    side: str
    dtype: str
    layouts: int
    steps: int
    curves: int  # distinct loss curves
    weights: int  # distinct digests, and so on
    gradients: int
    optimizers: int
    parted: float  # the largest difference of two layouts' losses at one step
    healthy: bool  # all finite, all changed

    @property
    def kept(self) -> bool:
        """One of each, from two layouts or more, of a run that moved."""
        one = self.curves == self.weights == self.gradients == self.optimizers == 1
        return one and self.layouts > 1 and self.steps > 0 and self.healthy


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Of one side and dtype."""
    curves = [outcome.curve for outcome in outcomes]
    by_step = list(zip(*(curve.losses for curve in curves), strict=True))
    return Verdict(
        side="stock" if any(o.stock for o in outcomes) else "isobit",
        dtype=", ".join(sorted({o.dtype for o in outcomes})),
        layouts=len({(o.layout, o.transport) for o in outcomes}),
        steps=len(by_step),
        curves=len({repr((curve.losses, curve.norms)) for curve in curves}),  # +0 is not -0
        weights=len({curve.weights for curve in curves}),
        gradients=len({curve.gradients for curve in curves}),
        optimizers=len({curve.optimizer for curve in curves}),
        parted=max((max(losses) - min(losses) for losses in by_step), default=float("nan")),
        healthy=bool(curves) and all(curve.finite and curve.changed for curve in curves),
    )


def run_jobs(
    jobs: Iterable[Job], tell: Callable[[Job], None] = lambda job: None, keep: Path | None = None
) -> list[Outcome]:
    """Each in turn. With `keep`, outcomes are a line each of that file; those that this code left are not run again."""
    known = read_outcomes(keep) if keep is not None else {}
    found = []
    for job in jobs:
        key = (job.layout, job.workload, job.dtype, job.stock, job.transport)
        outcome = known.get(key)
        if outcome is None:
            curve, seconds = run_job(job)
            outcome = Outcome(job.layout, job.dtype, job.stock, job.transport, curve, seconds)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(
                        json.dumps(
                            {"code": code_digest(), "workload": job.workload, **asdict(outcome)}
                        )
                        + "\n"
                    )
        found.append(outcome)
        tell(job)
    return found


def read_outcomes(path: Path) -> dict[tuple[Layout, str, str, bool, str], Outcome]:
    """What `run_jobs` of this code wrote; a line that was cut short, as when it was killed, is taken off the file."""
    known = {}
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    for line in whole.splitlines():
        said = json.loads(line)
        if said.pop("code", "") != code_digest():
            continue  # another version's
        workload, layout, curve = (
            said.pop("workload"),
            Layout(**said.pop("layout")),
            Curve.read(said.pop("curve")),
        )
        outcome = Outcome(layout=layout, curve=curve, **said)
        known[layout, workload, outcome.dtype, outcome.stock, outcome.transport] = outcome
    return known
