"""Gradient accumulation with accelerate, whose result does not depend on micro-batches or ranks.

    python examples/accelerate_accumulation.py
    torchrun --nproc-per-node 2 examples/accelerate_accumulation.py

Eight samples per step, as one micro-batch, as several, and on several ranks: isobit has one digest of the weights, also
between the two commands. Stock accelerate has several. Needs `pip install accelerate`.
"""

import copy
import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

import isobit
from isobit.parallel import GlobalBatch, GlobalBatchSampler, Gradients

GLOBAL, STEPS = 8, 3  # samples per step, and steps
CONFIG = Qwen3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
LENGTHS = [5 + at * 7 % 9 for at in range(GLOBAL * STEPS)]
SAMPLES = [torch.arange(length) * 11 % 127 + 1 for length in LENGTHS]


def collate(samples):
    """Pad to the longest of the micro-batch. The first token of a sample has no label: nothing precedes it."""
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def build_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), dtype=torch.bfloat16).train()


def make_loader(batch, rank):
    """Return this rank's micro-batches. Not prepared by accelerate, which would divide them over ranks again."""
    sampler = GlobalBatchSampler(len(SAMPLES), batch, rank, shuffle=False)
    return DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=collate)


def count_labels(accelerator, held):
    """Return the labels of the global batch, on every rank: the loss of each micro-batch is divided by it."""
    count = torch.stack([(inputs["labels"] != -100).sum() for inputs in held]).sum()
    return accelerator.reduce(count)


def train(micro_batches):
    """Train with isobit and return the digest of the weights."""
    accelerator = Accelerator(
        cpu=True
    )  # without gradient_accumulation_steps: Gradients accumulates
    batch = GlobalBatch(total=GLOBAL, ranks=accelerator.num_processes, micro_batches=micro_batches)
    model = isobit.enable(build_model())  # not prepared: Gradients exchanges what DDP would
    optimizer = accelerator.prepare(isobit.optim.AdamW(model.parameters(), lr=1e-3))
    gradients = Gradients(model, batch)
    loader = iter(make_loader(batch, accelerator.process_index))
    for _ in range(STEPS):
        held = [next(loader) for _ in range(micro_batches)]
        count = count_labels(accelerator, held)
        for micro, inputs in enumerate(held):
            with gradients.micro_batch(micro):
                accelerator.backward(model(**inputs, num_items_in_batch=count).loss)
        isobit.parallel.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    gradients.close()
    return isobit.bits.digest(model)


def train_stock(micro_batches):
    """Train as accelerate's documentation does, and return the digest of the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    ranks = accelerator.num_processes
    batch = GlobalBatch(total=GLOBAL, ranks=ranks, micro_batches=micro_batches)
    plain = build_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    loader = iter(make_loader(batch, accelerator.process_index))
    for _ in range(STEPS):
        held = [next(loader) for _ in range(micro_batches)]
        count = count_labels(accelerator, held)
        for inputs in held:
            with accelerator.accumulate(model):
                loss = model(**inputs, num_items_in_batch=count).loss
                # accelerate divides by the micro-batches, and DDP by the ranks
                accelerator.backward(loss * micro_batches * ranks)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(plain.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return isobit.bits.digest(plain)


def main():
    torch.set_num_threads(1)
    for name, run in (("isobit", train), ("stock", train_stock)):
        digests = set()
        for micro_batches in (1, 2, 4, 8):
            ranks = Accelerator(cpu=True).num_processes
            if micro_batches * ranks > GLOBAL:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's and accelerate's own
                digests.add(digest := run(micro_batches))
            if Accelerator().is_main_process:
                size = GLOBAL // ranks // micro_batches
                print(f"{name:7}{ranks} × {micro_batches} × {size} samples  {digest}", flush=True)
        if Accelerator().is_main_process:
            plural = "s" * (len(digests) > 1)
            print(f"{name:7}{len(digests)} digest{plural}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
