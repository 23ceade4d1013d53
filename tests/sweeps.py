"""Parts of a sweep that every run has; the others wait for `./check --full`."""

import pytest


def mostly_full(values, always):
    """Values to parametrize a test with: those that are not in `always` run in `./check --full` only."""
    return [v if v in always else pytest.param(v, marks=pytest.mark.full) for v in values]
