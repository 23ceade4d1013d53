"""Fixtures of tests of other people's programs."""

import sys

import pytest


@pytest.fixture
def no_vllm(monkeypatch):
    """Keep TRL from taking the folder tests/vllm for vLLM: pytest puts the folder above it on the path."""
    monkeypatch.setitem(sys.modules, "vllm", None)
