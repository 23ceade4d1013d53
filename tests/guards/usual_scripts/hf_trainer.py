"""Train with transformers' Trainer: torchrun --nproc-per-node 2 hf_trainer.py."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main():
    set_seed(0)
    # Before the model: it chooses the device of this rank, which .cuda() then uses.
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        adam_beta2=0.95,
        warmup_steps=2,
        max_grad_norm=1.0,
        max_steps=6,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).cuda()
    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(0))
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=dataset)
    trainer.train()


if __name__ == "__main__":
    main()
