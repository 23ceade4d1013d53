"""Train a small model by transformers' Trainer and print the digest of its weights: one layout of one global batch.

Run: torchrun --nproc-per-node RANKS trainer_worker.py KIND SIZE ACCUMULATION, with KIND ordered or stock; or with LoRA,
a name of LORA below.
"""

import copy
import sys
import tempfile
import warnings

import peft
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import isobit
from isobit import bits
from isobit.gates.model.models import build_model
from isobit.integrations.transformers import OrderedTrainer

SAMPLES, STEPS, WIDTH = 24, 3, 14
LORA = {
    "lora": ("ordered", {"lora": {"lora_dropout": 0.1}}),
    "merged": ("ordered", {"lora": {}, "mode": "merged"}),
    "stock-lora": ("stock", {"lora": {"lora_dropout": 0.1}}),
}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, at):
        length = 5 + at * 7 % 9
        generator = torch.Generator().manual_seed(at)
        return {"input_ids": torch.randint(1, 100, (length,), generator=generator)}


def collate(samples):
    """Pad on the right to the longest of the micro-batch, so that padding depends on the layout."""
    width = max(len(s["input_ids"]) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        count = len(sample["input_ids"])
        ids[row, :count], mask[row, :count] = sample["input_ids"], 1
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def train(kind, size, accumulation, dtype=torch.bfloat16, lora=None, mode="beside", **options):
    """Return the digest of the weights after three steps, and the loss that was logged.

    `lora` are options of peft.LoraConfig.
    """
    model = copy.deepcopy(build_model("qwen3-tiny", dtype)).train()
    if lora is not None:
        torch.manual_seed(0)
        asked = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **lora}
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **asked))
    if kind == "ordered":
        isobit.enable(model, adapters=mode if lora is not None else None)
    asked = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 1,
        "remove_unused_columns": False,
        "log_level": "error",
    }
    arguments = TrainingArguments(tempfile.mkdtemp(), **(asked | options))
    made = OrderedTrainer if kind == "ordered" else Trainer
    trainer = made(model, arguments, data_collator=collate, train_dataset=Samples())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return bits.digest(model), losses, norms


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, size, accumulation = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if kind in LORA:
        digest, losses, norms = train(*LORA[kind][:1], size, accumulation, **LORA[kind][1])
    else:
        digest, losses, norms = train(kind, size, accumulation)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("digest", digest, losses, norms, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
