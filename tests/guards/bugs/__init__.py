"""TrainCheck's 20 bugs, the six that it found, and others: each a small program beside its right twin."""

from tests.guards.bugs import around_the_loop, on_one_rank, on_ranks
from tests.guards.bugs.bug import CATALOGUE, Bug, Found

__all__ = ["CATALOGUE", "Bug", "Found", "around_the_loop", "on_one_rank", "on_ranks"]
