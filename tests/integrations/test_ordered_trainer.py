"""OrderedTrainer: one digest for every number of micro-batches and ranks; transformers' own Trainer has several.

Eight samples per step in 8 × 1, 4 × 2, 2 × 4 and 1 × 8 (size × accumulation), padded per micro-batch, three steps of
AdamW with clipping; then the same on 2 and 4 ranks over gloo (`./check --full`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer_worker
from transformers import TrainingArguments

import isobit
from isobit.gates.model.models import build_model
from isobit.integrations.transformers import OrderedTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's and torch's
WORKER = Path(__file__).with_name("trainer_worker.py")
LAYOUTS = [(8, 1), (2, 4), (1, 8)]
RANKS = [(2, 4, 1), (2, 1, 4), (4, 2, 1), (4, 1, 2)]


def test_micro_batches_do_not_matter():
    found = [trainer_worker.train("ordered", *layout, max_steps=2) for layout in LAYOUTS]
    assert len({digest for digest, *_ in found}) == 1
    assert len({tuple(norms) for *_, norms in found}) == 1  # of gradients, before clipping
    before = isobit.bits.digest(build_model("qwen3-tiny", torch.bfloat16))
    assert found[0][0] != before


@pytest.mark.full
def test_the_stock_trainer_has_several_results():
    found = {layout: trainer_worker.train("stock", *layout)[0] for layout in LAYOUTS}
    print(f"\nstock: {found}")
    assert len(set(found.values())) > 1


def launch(kind, ranks, size, accumulation):
    """Return the digest that rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(WORKER), kind, str(size), str(accumulation)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("digest"))


@pytest.mark.full
def test_ranks_do_not_matter():
    alone = trainer_worker.train("ordered", 8, 1)[0]
    found = {layout: launch("ordered", *layout) for layout in RANKS}
    stock = {layout: launch("stock", *layout) for layout in RANKS[:2]}
    print(f"\none rank: {alone}\nordered: {found}\nstock: {stock}")
    assert set(found.values()) == {alone}
    assert len({*stock.values(), trainer_worker.train("stock", 8, 1)[0]}) > 1


def make(model, **options):
    asked = {"use_cpu": True, "report_to": [], "per_device_train_batch_size": 2}
    arguments = TrainingArguments("unused", **(asked | options))
    return OrderedTrainer(
        model,
        arguments,
        data_collator=trainer_worker.collate,
        train_dataset=trainer_worker.Samples(),
    )


@pytest.mark.parametrize("options", [{"bf16": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_options_that_change_the_sum_are_refused(options):
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    with pytest.raises(isobit.UnsupportedError, match=next(iter(options))):
        make(model, **options)


def test_a_stock_model_is_refused():
    with pytest.raises(isobit.UnsupportedError, match=r"isobit\.enable"):
        make(build_model("qwen3-tiny", torch.float32))


def test_a_batch_that_cannot_be_cut_is_refused():
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    with pytest.raises(isobit.CutError, match="shares"):
        make(model, gradient_accumulation_steps=3).train()
