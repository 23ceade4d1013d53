"""Programs of TRL, imported where it is installed: `./check --full` installs it."""

import tempfile

import torch
from datasets import Dataset
from trl import GRPOTrainer, SFTConfig, SFTTrainer

from tests.guards.right.program import right
from tests.integrations.test_trl import build_model, build_tokenizer, trainer_of


@right
def supervised_fine_tuning():
    texts = [" ".join(f"t{(7 * i + j) % 250}" for j in range(3 + i % 5)) for i in range(32)]
    given = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=build_model(torch.float32),
            args=SFTConfig(folder, per_device_train_batch_size=4, max_steps=4, bf16=False, **given),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=build_tokenizer(),
        ).train()


@right
def group_relative_policy():
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(GRPOTrainer, build_model(torch.float32), folder, max_steps=4).train()
