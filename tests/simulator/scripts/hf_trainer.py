"""Train a small GPT-2 from scratch with transformers' Trainer, after its example run_clm.py."""

import sys
import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


def main():
    words = (
        sys.argv[1:]
        if "--output_dir" in sys.argv
        else ["--output_dir", tempfile.mkdtemp(), *sys.argv[1:]]
    )
    defaults = ["--max_steps", "2", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    defaults += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true"]
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*defaults, *words]
    )
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(0)
    count = 4 * training_args.world_size
    tokens = torch.randint(64, (count, 12), generator=generator)
    train_dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset)
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {result.training_loss:.5f} with {training_args.world_size} processes")


if __name__ == "__main__":
    main()
