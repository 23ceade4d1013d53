"""Planted bugs, each a small program beside its clean twin."""

from isobit.simulator.bugs import disagreements, messages, replicas
from isobit.simulator.bugs.bug import CATALOGUE, Bug

__all__ = ["CATALOGUE", "Bug", "disagreements", "messages", "replicas"]
