"""Poisons memory: whatever torch allocates without values is NaN, in Python and in the kernels alike."""

import sys

import hypothesis
import pytest
import torch

# Machines are shared: how long an example takes says nothing of the code.
hypothesis.settings.register_profile("isobit", deadline=None)
hypothesis.settings.load_profile("isobit")

# Files that take half a minute or more, longest first. A worker takes a whole file, so these start first: otherwise one
# worker would be left with the longest of them at the end, while the other has nothing to do.
LONG = (
    "test_library",
    "test_triton_executors",
    "test_collectives",
    "test_compare_runs",
    "test_contract_commands",
    "test_add_an_operator",
    "test_docs",
    "test_targets",
    "test_reveal",
    "test_arithmetic",
)


def take_part_of_sweeps(items):
    """Mark all but n cases of a test as `full` if it is marked `sweep(n)`; those that stay are evenly apart."""
    sweeps = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark and not item.get_closest_marker("full"):
            cases = sweeps.setdefault((item.path, item.originalname), (mark.args[0], []))
            cases[1].append(item)
    for count, cases in sweeps.values():
        kept = {at * len(cases) // count for at in range(count)}
        for at, item in enumerate(cases):
            if at not in kept:
                item.add_marker("full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    take_part_of_sweeps(items)
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(autouse=True, scope="session")
def _poison_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # stock's orders depend on it, in the tests that follow


@pytest.fixture
def no_vllm(monkeypatch):
    """Keep TRL from taking the folder tests/vllm for vLLM: pytest puts the folder above it on the path."""
    monkeypatch.setitem(sys.modules, "vllm", None)
