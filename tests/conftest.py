"""Poisons memory: whatever torch allocates without values is NaN, in Python and in the kernels alike."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _poison_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
