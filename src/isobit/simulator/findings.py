"""The findings of a run, and findings about training by kind: what was expected, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobit.errors import IsobitError, NonFiniteError, PendingError, SimulationError, TrainingError


class Killed(BaseException):
    """Ends the thread of a rank. It is no `Exception`, so that a program does not catch it by accident."""


class Findings:
    """What the checkers of one run found, and why the run stops if it does.

    Attributes:
        strict: Whether `stop` ends the run.
        found: All findings, in the order in which they were made.
        root: The error that ends the run: every rank raises a copy of it at its next call.
        lost: By rank, a sentence about a message or a thread of the rank that was lost.
        failed: Ranks that raised an error of their own, in that order.
    """

    def __init__(self, strict: bool) -> None:
        """Start without findings."""
        self.strict = strict
        self.found: list[SimulationError] = []
        self.root: SimulationError | None = None
        self.lost: dict[int, str] = {}
        self.failed: list[int] = []

    def note(self, finding: SimulationError) -> None:
        """Record a finding and let the run go on."""
        self.found.append(finding)

    def stop(self, finding: SimulationError) -> None:
        """Record a finding; if the run is strict, end it with the first finding."""
        self.found.append(finding)
        self.end()

    def end(self) -> None:
        """End a strict run with its first finding."""
        if self.strict and self.root is None:
            self.root = self.found[0]


def copy_error(error: IsobitError) -> IsobitError:
    """Copy an error so that another rank can raise it with a traceback of its own."""
    if not isinstance(error, SimulationError):
        return type(error)(expected=error.expected, received=error.received, remedy=error.remedy)
    copied = type(error)(
        expected=error.expected,
        received=error.received,
        remedy=error.remedy,
        ranks=error.ranks,
        stacks=error.stacks,
    )
    kept = ("waits", "cycle", "kind", "note", "follows")
    vars(copied).update({name: value for name, value in vars(error).items() if name in kept})
    return copied


WORDS = {  # kind: (what was expected, remedy)
    "start differs": (
        "replicas that start with the same parameters",
        "broadcast the parameters from one rank before training, or use one seed on all ranks",
    ),
    "gradients differ": (
        "replicas that update with the same gradients",
        "reduce every gradient over all replicas: call the wrapper, not the module inside it; check the group",
    ),
    "update differs": (
        "replicas whose update of the same gradients is the same",
        "use one learning rate, optimizer state and schedule on all ranks",
    ),
    "buffers differ": (
        "replicas that evaluate with the same buffers",
        "reduce the statistics over ranks, or broadcast the buffers before evaluating",
    ),
    "data alike": (
        "data-parallel ranks that train on different batches",
        "give the sampler the rank and the number of ranks",
    ),
    "random numbers alike": (
        "replicas whose dropout masks are different",
        "set a different seed on each rank after the parameters are made",
    ),
    "pending": (
        "gradients whose reduction is done",
        "call .wait() on the handle of the collective, then step",
    ),
    "not finite": ("gradients that are finite numbers", "look for the source on the ranks named"),
    "gradients kept": (
        "gradients of this step only",
        "call optimizer.zero_grad() before each backward pass that starts a step",
    ),
    "not updated": (
        "every parameter that has a gradient in an optimizer",
        "make the optimizer after the model is moved, copied or unfrozen; freeze what shall not train",
    ),
    "order repeated": (
        "another order of samples in each epoch",
        "call sampler.set_epoch(epoch) before each epoch",
    ),
    "dropout on": (
        "no dropout while the model is evaluated",
        "pass training=self.training to torch.nn.functional.dropout",
    ),
    "file shared": (
        "one rank that writes a file, or a name per rank",
        "save on rank 0 only, then call a barrier",
    ),
    "tensors differ": (
        "a tensor that is the same on all ranks",
        "look for what only the ranks named do",
    ),
    "tensors alike": (
        "a tensor that is different on all ranks",
        "look for what the ranks named share, such as a seed",
    ),
    "weights differ": (
        "each rank's share with the weight that it has on one worker",
        "sum over ranks, then divide once by the global count; clip after the reduction",
    ),
    "differs from one worker": (
        "the numbers of one worker",
        "compare the ranks named with one worker at this place",
    ),
}


# Which kinds of an earlier step may have led to a finding: then it may not be a fault of its own.
LEADS_TO = {
    "gradients differ": (
        "start differs",
        "update differs",
        "buffers differ",
        "pending",
        "not finite",
    ),
    "update differs": (
        "start differs",
        "gradients differ",
        "buffers differ",
        "pending",
        "not finite",
    ),
    "buffers differ": (
        "start differs",
        "gradients differ",
        "update differs",
        "pending",
        "not finite",
    ),
    "tensors differ": (
        "start differs",
        "gradients differ",
        "update differs",
        "buffers differ",
        "pending",
        "not finite",
    ),
    "not finite": (
        "gradients kept",
        "pending",
        "start differs",
        "gradients differ",
        "update differs",
    ),
}


@dataclass(frozen=True)
class TrainingFinding:
    """Something wrong with training.

    Attributes:
        kind: A key of `WORDS`.
        ranks: The ranks to blame.
        text: What was found.
        sites: The line where each of these ranks made the step.
        follows: The kind of another finding that it may follow from.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    sites: Mapping[int, str] = field(default_factory=dict)
    follows: str = ""


def as_error(finding: TrainingFinding) -> SimulationError:
    """Convert a finding into the matching `SimulationError`."""
    kinds = {"not finite": NonFiniteError, "pending": PendingError}
    expected, remedy = WORDS[finding.kind]
    error = kinds.get(finding.kind, TrainingError)(
        expected=expected,
        received=finding.text,
        remedy=remedy,
        ranks=finding.ranks,
        stacks={rank: [site] for rank, site in finding.sites.items() if site},
    )
    error.kind, error.follows = finding.kind, finding.follows
    return error
