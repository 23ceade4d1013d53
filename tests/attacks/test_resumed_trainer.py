"""OrderedTrainer resumes at any layout with the bits of a whole run, or says why it does not.

transformers writes a checkpoint file by file, and takes a folder with weights and without an optimizer as a checkpoint.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import isobit
from isobit import ArgumentError, bits
from isobit.gates.model.models import build_model
from isobit.integrations.transformers import OrderedTrainer
from tests.integrations import trainer_worker

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's and torch's
ROOT = Path(__file__).parents[2]
STEPS, SAVED = 5, 4  # three steps are an epoch, so the fourth is inside the second


def train(folder, size, accumulation, resume=None, **options):
    """Return the digest of the weights after five steps."""
    model = isobit.enable(build_model("qwen3-tiny", torch.bfloat16).train())
    asked = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
        "log_level": "error",
    }
    arguments = TrainingArguments(str(folder), **(asked | options))
    data = {"data_collator": trainer_worker.collate, "train_dataset": trainer_worker.Samples()}
    OrderedTrainer(model, arguments, **data).train(resume_from_checkpoint=resume)
    return bits.digest(model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped: its folder and the digest of its weights."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, 8, 1)


@pytest.mark.parametrize(("size", "accumulation"), [(2, 4), (1, 8)])
@pytest.mark.parametrize("step", [3, SAVED])
def test_resumed_in_other_micro_batches(whole, tmp_path, step, size, accumulation):
    folder, digest = whole
    assert train(tmp_path, size, accumulation, str(folder / f"checkpoint-{step}")) == digest


def remove(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def flip(folder):
    data = bytearray((folder / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "optimizer.pt").write_bytes(data)


DAMAGE = {
    "no optimizer": remove("optimizer.pt"),
    "no scheduler": remove("scheduler.pt"),
    "no state": remove("trainer_state.json"),
    "no weights": remove("model.safetensors"),
    "weights alone": remove("optimizer.pt", "scheduler.pt", "isobit.json"),
    "half of the optimizer": lambda folder: os.truncate(folder / "optimizer.pt", 1000),
    "a flipped bit": flip,
    "no record": remove("isobit.json"),
    "half a record": lambda folder: os.truncate(folder / "isobit.json", 9),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(whole, tmp_path, damage):
    name = f"checkpoint-{SAVED}"
    shutil.copytree(whole[0] / name, tmp_path / name)
    DAMAGE[damage](tmp_path / name)
    with pytest.raises(ArgumentError, match=r"(?s)OrderedTrainer\.train: .*remedy: resume from"):
        train(tmp_path, 8, 1, resume=True)


@pytest.mark.parametrize(
    "other",
    [(4, 1, {}), (8, 2, {"max_steps": 5}), (8, 1, {"seed": 7}), (8, 1, {"data_seed": 7})],
    ids=str,
)
def test_another_run_is_refused(whole, tmp_path, other):
    size, accumulation, options = other
    with pytest.raises(ArgumentError, match=f"as the run that saved checkpoint-{SAVED}"):
        train(tmp_path, size, accumulation, str(whole[0] / f"checkpoint-{SAVED}"), **options)


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(OrderedTrainer, "_save_checkpoint", Trainer._save_checkpoint)
    train(tmp_path, 8, 1, max_steps=1)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="from_pretrained"):
        train(tmp_path, 8, 1, resume=True)


KILLED = """
import os, signal, sys
from transformers import Trainer
from tests.attacks.test_resumed_trainer import train
right = Trainer.{place}
def die(self, *given):
    if self.state.global_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(self, *given)
Trainer.{place} = die
train(sys.argv[1], 2, 4)
"""


@pytest.mark.parametrize(
    "place",
    ["_save_optimizer_and_scheduler", pytest.param("_save_rng_state", marks=pytest.mark.full)],
)
def test_a_trainer_that_is_killed_while_it_saves(whole, tmp_path, place):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(place=place), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-1000:]
    assert (tmp_path / "checkpoint-5" / "model.safetensors").exists()
    with pytest.raises(ArgumentError, match="checkpoint-4") as refused:
        train(tmp_path, 8, 1, resume=True)
    assert "checkpoint-5" not in refused.value.remedy
    assert train(tmp_path, 8, 1, resume=str(tmp_path / "checkpoint-4")) == whole[1]
