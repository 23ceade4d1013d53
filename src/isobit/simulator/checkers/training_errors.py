"""What is wrong with training, by kind, as an error: what was expected, and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isobit.errors import NonFiniteError, PendingError, SimulationError, TrainingError

WORDS = {  # kind: what was expected, and the remedy
    "start differs": (
        "replicas that start with the same parameters",
        "broadcast the parameters from one rank before training, or seed all ranks alike",
    ),
    "gradients differ": (
        "replicas that update with the same gradients",
        "reduce every gradient over all replicas: call the wrapper, not the module in it; check the group",
    ),
    "update differs": (
        "replicas that make the same update of the same gradients",
        "give all ranks one learning rate, optimizer state and schedule",
    ),
    "buffers differ": (
        "replicas that evaluate with the same buffers",
        "reduce the statistics over ranks, or broadcast the buffers before evaluating",
    ),
    "data alike": (
        "replicas that train on batches of their own",
        "give the sampler the rank and the number of ranks",
    ),
    "random numbers alike": (
        "replicas that drop elements of their own choice",
        "seed each rank differently after the parameters are made",
    ),
    "pending": (
        "gradients whose reduction is done",
        "call .wait() on what the collective returned, then step",
    ),
    "not finite": ("gradients that are finite numbers", "look for its source on the ranks named"),
    "tensors differ": (
        "a tensor that is the same on all ranks",
        "see what the ranks named do alone",
    ),
    "tensors alike": (
        "a tensor that is distinct on all ranks",
        "see what the ranks named do in common",
    ),
    "weights differ": (
        "each rank's share with the weight that it has on one worker",
        "sum over ranks, then divide once by the global count; clip after the reduction",
    ),
    "parts from one worker": (
        "the numbers of one worker",
        "compare the ranks named with one worker at this place",
    ),
}


@dataclass(frozen=True)
class Told:
    """A bug, by kind, with the ranks to blame and the place."""

    kind: str
    ranks: tuple[int, ...]
    where: str
    text: str
    sites: Mapping[int, str] = field(default_factory=dict)
    """Where each of them made the step."""


def as_error(told: Told) -> SimulationError:
    """What was told, as errors are."""
    kind = {"not finite": NonFiniteError, "pending": PendingError}.get(told.kind, TrainingError)
    expected, remedy = WORDS[told.kind]
    stacks = {rank: [site] for rank, site in told.sites.items() if site}
    error = kind(
        expected=expected, received=told.text, remedy=remedy, ranks=told.ranks, stacks=stacks
    )
    error.kind = told.kind
    return error
