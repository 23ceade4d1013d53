"""Recorded hangs, each beside its right twin."""

from tests.simulator.autopsy.hangs import collectives, disagreements, incomplete, messages
from tests.simulator.autopsy.hangs.hang import HANGS, Hang, record

__all__ = ["HANGS", "Hang", "collectives", "disagreements", "incomplete", "messages", "record"]
