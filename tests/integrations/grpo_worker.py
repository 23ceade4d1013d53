"""Train a small model by isobit's GRPOTrainer on each rank and print the digest of its weights.

Run: torchrun --nproc-per-node RANKS grpo_worker.py SIZE ACCUMULATION
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from test_trl import build_model, trainer_of

import isobit
from isobit import bits
from isobit.integrations.trl import GRPOTrainer

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = isobit.enable(build_model(torch.bfloat16))
    trainer = trainer_of(
        GRPOTrainer,
        model,
        tempfile.mkdtemp(),
        per_device_train_batch_size=int(sys.argv[1]),
        gradient_accumulation_steps=int(sys.argv[2]),
        learning_rate=1e-3,
        ddp_backend="gloo",
    )
    trainer.train()
    print(f"digest {bits.digest(model)} {trainer.differ} {trainer.compared}\n", end="", flush=True)
    dist.destroy_process_group()
