"""accelerate without a Trainer: one digest for every number of micro-batches and ranks; stock has several.

The program is examples/accelerate_accumulation.py; ranks over gloo are run by `./check --full`.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's and torch's
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_accumulation.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("accelerate_accumulation", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_micro_batches_do_not_matter_and_do_in_stock(example):
    counts = (1, 4, 8)  # 1 × 8, 4 × 2 and 8 × 1 samples
    before = example.isobit.bits.digest(example.build_model())
    ours = {example.train(count) for count in counts}
    assert len(ours) == 1
    assert ours != {before}
    assert len({example.train_stock(count) for count in counts[::2]}) > 1


@pytest.mark.full
def test_ranks_do_not_matter(example):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    print(done.stdout)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {
        name: {w[-1] for w in lines if w[0] == name and w[1] == "2"} for name in ("isobit", "stock")
    }
    rows = [w for w in lines if w[:2] == ["isobit", "2"]]
    assert len(rows) == 3  # 1, 2 and 4 micro-batches
    assert found["isobit"] == {example.train(2)}
    assert len(found["stock"] | {example.train_stock(1)}) > 1
