"""Gradients whose norm overflows fp32: 1e35 is above the limit though it is finite, and clipped ones are silent."""

import pytest
import torch

from isobit import optim
from isobit.guards import watch


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_overflows(clipped, dtype):
    model = torch.nn.Linear(8, 1, dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, sinks=[], max_norm=1.0) as guard:
        (model(torch.ones(2, 8, dtype=dtype)) * 1e35).sum().backward()
        if clipped:
            optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    rules = [finding.name for finding in guard.findings if finding.severity == "error"]
    # The square of 1e35 overflows the optimizer's mean of squares too.
    assert rules == ([] if clipped else ["norm-above-limit", "state-nonfinite"])
    if not clipped:
        assert 5e35 < guard.findings[0].value < 7e35  # 2e35 · √9
        assert guard.nonfinite_steps == 0


def test_an_infinity_is_still_not_finite():
    model = torch.nn.Linear(8, 1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer, sinks=[], max_norm=1.0) as guard:
        (model(torch.ones(2, 8)) * 1e35 * 1e35).sum().backward()
        optimizer.step()
    assert "nonfinite-gradient" in [finding.name for finding in guard.findings]
