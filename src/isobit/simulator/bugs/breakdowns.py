"""Planted breakdowns of the network and the hosts, under programs that are right."""

from __future__ import annotations

from isobit.simulator.bugs.bug import one, planted
from isobit.simulator.bugs.messages import ring
from isobit.simulator.bugs.toy import build_model, train
from isobit.simulator.faults import Die, Drop, Fault, Flip, PlantNaN, Stall

CALLS = 12  # the all-reduces that a rank makes while it trains


def at(seed: int) -> tuple[int, int]:
    """A rank and one of its calls."""
    return seed % 4, 1 + seed % CALLS


def bit_of_sum(seed: int) -> tuple[Fault, ...]:
    """A bit of the mantissa, on the last hop of one sum to the next rank."""
    return (Flip((seed - 1) % 4, 1 + seed % CALLS, element=seed, bit=seed % 23, to=seed % 4),)


@planted("a rank dies", "rank lost", faults=lambda seed: (Die(*at(seed)),))
def dead_rank(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


@planted("a rank stalls for good", "rank lost", faults=lambda seed: (Stall(*at(seed)),))
def stalled_rank(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


@planted("a rank's part of a sum is lost", "deadlock", faults=lambda seed: (Drop(*at(seed)),))
def lost_part(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


@planted("a message is lost", "deadlock", faults=lambda seed: (Drop(seed % 4),))
def lost_message(rank: int, seed: int, wrong: bool) -> None:
    ring(rank)


@planted("a bit flips in flight", "corruption", faults=lambda seed: (Flip(*at(seed), element=seed, bit=seed % 32),))
def flipped_bit(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


@planted(
    "a bit flips in flight, checksums off: the replicas tell", "gradients differ", faults=bit_of_sum, watch=("training",)
)
def flipped_bit_of_replica(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))


@planted("a NaN appears in what a rank sends", "not finite", one, faults=lambda seed: (PlantNaN(*at(seed), element=seed),))
def planted_nan(rank: int, seed: int, wrong: bool) -> None:
    train(rank, seed, build_model(seed))
