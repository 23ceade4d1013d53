"""Train with Lightning on every GPU: torchrun --nproc-per-node 2 lightning_trainer.py."""

import os
import tempfile

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0, verbose=False)
    data = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(64, 8, generator=data), torch.randint(0, 4, (64,), generator=data)
    )
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(Classifier(), DataLoader(dataset, batch_size=4, shuffle=True))


if __name__ == "__main__":
    main()
