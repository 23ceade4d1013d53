"""Golden digests: a version of the order gives these bits, on this engine, for ever. A change is a new version."""

import json
from pathlib import Path

import pytest
import torch

from isobit.library.linear.planted import OURS
from isobit.ops import dispatch
from isobit.order.plan import VERSION
from tests.golden.golden_cases import CASES, digests, key_of

GOLDEN = json.loads((Path(__file__).parent / "linear.json").read_text())


def test_golden_digests_are_of_this_version():
    remedy = "run python -m tests.golden.write_digests, and write a decision"
    assert GOLDEN["order"] == VERSION, f"digests of version {GOLDEN['order']}: {remedy}"
    engines = {key.split()[1] for key in GOLDEN["digests"]}
    assert engines == {"chain", "amx"}


@pytest.mark.parametrize(("dtype", "k", "n"), CASES)
def test_golden(dtype, k, n):
    engine = dispatch.engine_of(getattr(torch, dtype))
    found = digests(OURS.output, OURS.input_grad, OURS.parameter_grads, dtype, k, n)
    assert found == GOLDEN["digests"][key_of(dtype, engine, k, n)]
