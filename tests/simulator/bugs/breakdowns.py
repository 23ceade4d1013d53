"""Planted breakdowns of the network and the hosts, under programs that are right."""

from __future__ import annotations

from isobit.simulator.faults import Die, Drop, Fault, Flip, PlantNaN, Stall
from tests.simulator.bugs.bug import planted
from tests.simulator.bugs.messages import ring
from tests.simulator.bugs.toy import build_model, train

CALLS = 8  # the all-reduces that a rank makes while it trains


def at(seed: int) -> tuple[int, int]:
    """A rank and one of its calls."""
    return seed % 4, 1 + seed % CALLS


def flip(seed: int) -> tuple[Fault, ...]:
    """Any bit of one element that a rank sends."""
    return (Flip(*at(seed), element=seed, bit=seed % 32),)


def flip_of_sum(seed: int) -> tuple[Fault, ...]:
    """A bit of the mantissa, on the last hop of one sum to the next rank."""
    return (Flip((seed - 1) % 4, 1 + seed % CALLS, element=seed, bit=seed % 23, to=seed % 4),)


def trains(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


def passes_on(rank: int, seed: int, wrong: bool) -> None:
    ring(rank)


planted("a rank dies", "rank lost", name="dead-rank", faults=lambda seed: (Die(*at(seed)),))(trains)
planted(
    "a rank stalls for good",
    "rank lost",
    name="stalled-rank",
    faults=lambda seed: (Stall(*at(seed)),),
)(trains)
planted(
    "a rank's part of a sum is lost",
    "deadlock",
    name="lost-part",
    faults=lambda seed: (Drop(*at(seed)),),
)(trains)
planted(
    "a message is lost", "deadlock", name="lost-message", faults=lambda seed: (Drop(seed % 4),)
)(passes_on)
planted("a bit flips in flight", "corruption", name="flipped-bit", faults=flip)(trains)
planted(
    "a bit flips in flight, checksums off: the replicas tell",
    "gradients differ",
    name="flipped-bit-of-replica",
    faults=flip_of_sum,
    watch=("training",),
)(trains)
planted(
    "a NaN in what a rank sends",
    "not finite",
    name="planted-nan",
    faults=lambda seed: (PlantNaN(*at(seed), seed),),
)(trains)
