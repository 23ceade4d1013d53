"""Planted bugs, each a small program beside its clean twin."""

from isobit.simulator.bugs import breakdowns, disagreements, messages, replicas
from isobit.simulator.bugs.bug import CATALOGUE, Bug

__all__ = ["CATALOGUE", "Bug", "breakdowns", "disagreements", "messages", "replicas"]
