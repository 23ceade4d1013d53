"""Poisons memory: whatever torch allocates without values is NaN, in Python and in the kernels alike."""

import hypothesis
import pytest
import torch

# Machines are shared: how long an example takes says nothing of the code.
hypothesis.settings.register_profile("isobit", deadline=None)
hypothesis.settings.load_profile("isobit")


@pytest.fixture(autouse=True, scope="session")
def _poison_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
