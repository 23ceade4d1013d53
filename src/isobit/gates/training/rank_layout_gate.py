"""The rank-layout gate: train in every layout and compare loss curves and digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from blake3 import blake3

from isobit.errors import UnsupportedError
from isobit.foundation.engines import LOCAL, open_engine
from isobit.foundation.files import write_text
from isobit.gates.training.launcher import Job, run_job
from isobit.gates.training.training_curve import Curve
from isobit.gates.training.workload import RankLayout
from isobit.ops import dispatch

# A digest of the code that trains. Stored curves of other code are not reused.


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return a digest of the package's files and kernels, the bf16 engine, and torch's version."""
    root = Path(dispatch.__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".so"))
    found = blake3(f"{torch.__version__}, {dispatch.engine_of(torch.bfloat16)}".encode())
    for path in files:
        found.update(f"\n{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest(length=8)


@dataclass(frozen=True)
class Outcome:
    """The result of one layout."""

    layout: RankLayout
    dtype: str
    stock: bool
    transport: str
    curve: Curve
    seconds: float

    @property
    def name(self) -> str:
        """A name for tables, such as "isobit ddp 2×2×1" (data × micro × tensor)."""
        return self.layout.of("stock" if self.stock else "isobit")


@dataclass(frozen=True)
class RankLayoutVerdict:
    """The comparison of all layouts of one side (isobit or stock) in one dtype."""

    side: str
    dtype: str
    layouts: int
    steps: int
    curves: int  # distinct loss curves
    weights: int  # distinct digests of weights; likewise below
    gradients: int
    optimizers: int
    largest_difference: float  # of two layouts' losses at one step
    healthy: bool  # everything is finite, and training changed the weights

    @property
    def kept(self) -> bool:
        """Whether two layouts or more gave one curve and digest of a run that changed weights."""
        one = self.curves == self.weights == self.gradients == self.optimizers == 1
        return one and self.layouts > 1 and self.steps > 0 and self.healthy


def judge(outcomes: Sequence[Outcome]) -> RankLayoutVerdict:
    """Compare the outcomes of one side and dtype."""
    curves = [outcome.curve for outcome in outcomes]
    by_step = list(zip(*(curve.losses for curve in curves), strict=True))
    return RankLayoutVerdict(
        side="stock" if any(o.stock for o in outcomes) else "isobit",
        dtype=", ".join(sorted({o.dtype for o in outcomes})),
        layouts=len({(o.layout, o.transport) for o in outcomes}),
        steps=len(by_step),
        curves=len({repr((curve.losses, curve.norms)) for curve in curves}),  # +0 is not -0
        weights=len({curve.weights for curve in curves}),
        gradients=len({curve.gradients for curve in curves}),
        optimizers=len({curve.optimizer for curve in curves}),
        largest_difference=max(
            (max(losses) - min(losses) for losses in by_step), default=float("nan")
        ),
        healthy=bool(curves) and all(curve.finite and curve.changed for curve in curves),
    )


def run_jobs(
    jobs: Iterable[Job],
    progress: Callable[[Job], None] = lambda job: None,
    keep: Path | None = None,
    on: str = LOCAL,
    processes: int = 1,
) -> list[Outcome]:
    """Run jobs, one after another or as tasks of an engine; return their outcomes in the order of the jobs.

    Args:
        jobs: The layouts to train.
        progress: Called with each job when it is done.
        keep: A file that stores one outcome per line; outcomes of the same code are not run again.
        on: The engine; see `isobit.foundation.engines`.
        processes: Number of local processes; with 1, jobs run in this one.

    Raises:
        UnsupportedError: If a worker has other code, another torch or another bf16 engine than this process.
    """
    jobs = list(jobs)
    known = read_outcomes(keep) if keep is not None else {}
    for job in (job for job in jobs if key_of(job) in known):
        progress(job)
    missing = [job for job in jobs if key_of(job) not in known]
    for job, curve, seconds in run_missing(missing, on, processes):
        outcome = Outcome(job.layout, job.dtype, job.stock, job.transport, curve, seconds)
        known[key_of(job)] = outcome
        if keep is not None:
            record = {"code": code_digest(), "workload": job.workload, **asdict(outcome)}
            with keep.open("a") as file:
                file.write(json.dumps(record) + "\n")
        progress(job)
    return [known[key_of(job)] for job in jobs]


Key = tuple[RankLayout, str, str, bool, str]


def key_of(job: Job) -> Key:
    """Return what tells the outcome of a job from others."""
    return job.layout, job.workload, job.dtype, job.stock, job.transport


def run_missing(jobs: Sequence[Job], on: str, processes: int) -> Iterator[tuple[Job, Curve, float]]:
    """Run jobs and yield curve and seconds of each as it ends."""
    if on == LOCAL and processes == 1:
        yield from ((job, *run_job(job)) for job in jobs)
        return
    with open_engine(on, processes) as pool:
        tasks = {pool.submit(run_with_digest, job): job for job in jobs}
        for task in as_completed(tasks):
            (curve, seconds), code = task.result()
            if code != code_digest():
                raise UnsupportedError(
                    expected="workers with the files, the torch and the bf16 engine of this process",
                    received=f"a worker with others ran {tasks[task].layout}",
                    remedy="install one version of isobit and torch on machines of one kind",
                )
            yield tasks[task], curve, seconds


def run_with_digest(job: Job) -> tuple[tuple[Curve, float], str]:
    """Run a job in a worker; return also the digest of the code that ran it."""
    return run_job(job), code_digest()


def read_outcomes(path: Path) -> dict[Key, Outcome]:
    """Read the outcomes that `run_jobs` of the same code stored.

    An incomplete last line, left by a run that was killed, is removed from the file.
    """
    known = {}
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    for line in whole.splitlines():
        record = json.loads(line)
        if record.pop("code", "") != code_digest():
            continue  # stored by another version of the code
        workload, layout, curve = (
            record.pop("workload"),
            RankLayout(**record.pop("layout")),
            Curve.read(record.pop("curve")),
        )
        outcome = Outcome(layout=layout, curve=curve, **record)
        known[layout, workload, outcome.dtype, outcome.stock, outcome.transport] = outcome
    return known
