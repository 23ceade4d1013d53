"""Planted bugs, each a small program beside its clean twin."""

from tests.simulator.bugs import breakdowns, disagreements, messages, replicas, waiting
from tests.simulator.bugs.bug import CATALOGUE, Bug, blamed, find

__all__ = [
    "CATALOGUE",
    "Bug",
    "blamed",
    "breakdowns",
    "disagreements",
    "find",
    "messages",
    "replicas",
    "waiting",
]
