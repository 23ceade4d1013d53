"""OrderedTrainer with LoRA: one digest for every number of micro-batches and ranks, with dropout; stock has several."""

import subprocess
import sys

import pytest
import trainer_worker
from test_ordered_trainer import WORKER
from trainer_worker import LORA

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's and torch's


def train(name, size, accumulation, **options):
    kind, asked = LORA[name]
    return trainer_worker.train(kind, size, accumulation, **asked, **options)


@pytest.mark.parametrize("name", ["lora", "merged"])
def test_micro_batches_do_not_matter(name):
    found = [train(name, *layout, max_steps=2) for layout in ((8, 1), (2, 4))]
    assert len({digest for digest, *_ in found}) == 1
    assert len({tuple(norms) for *_, norms in found}) == 1
    assert found[0][1][0] > 0


def test_dropout_is_not_left_out():
    without = trainer_worker.train("ordered", 8, 1, lora={"lora_dropout": 0.0}, max_steps=1)
    assert train("lora", 8, 1, max_steps=1)[0] != without[0]


def launch(name, ranks, size, accumulation):
    """Return the digest that rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(WORKER), name, str(size), str(accumulation)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["lora", "merged"])
def test_two_ranks_of_four_micro_batches_are_one_batch(name):
    alone = train(name, 8, 1)[0]
    assert launch(name, 2, 1, 4) == alone
    assert launch(name, 2, 4, 1) == alone


@pytest.mark.full
def test_the_stock_trainer_has_several_results():
    found = {layout: train("stock-lora", *layout)[0] for layout in ((8, 1), (2, 4), (1, 8))}
    found[2, 1, 4] = launch("stock-lora", 2, 1, 4)
    print(f"\nstock: {found}")
    assert len(set(found.values())) > 1
