"""Planted bugs, each a small program beside its clean twin."""

from tests.simulator.bugs import breakdowns, disagreements, habits, messages, replicas, waiting
from tests.simulator.bugs.bug import CATALOGUE, Bug, blamed, find

__all__ = [
    "CATALOGUE",
    "Bug",
    "blamed",
    "breakdowns",
    "disagreements",
    "find",
    "habits",
    "messages",
    "replicas",
    "waiting",
]
