"""Programs of Lightning: its own loop with a watch in it, a loop by hand, and validation between steps."""

import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.guards.right.networks import mlp
from tests.guards.right.program import ids, rand, right


def batches(rows=48):
    return DataLoader(TensorDataset(rand(0, rows, 8), ids(0, rows, below=4)), 4, shuffle=True)


def run(module, *loaders, **options):
    """Fit a module with a watch of its own, which must be silent too."""
    import lightning.pytorch as lightning

    from isobit.integrations.lightning import WatchCallback

    callback = WatchCallback(sinks=[])
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=8,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )
        try:
            trainer.fit(module, *loaders)
        finally:
            assert callback.watches
            assert [str(event) for each in callback.watches for event in each.findings] == []


def classifier(**methods):
    """A module of Lightning that classifies; `methods` are added to its class."""
    import lightning.pytorch as lightning

    def make(self):
        lightning.LightningModule.__init__(self)
        self.net = mlp(8, 16, 4)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)

    own = {
        "__init__": make,
        "forward": lambda self, x: self.net(x),
        "training_step": lambda self, batch, at: loss(self, batch),
        "validation_step": lambda self, batch, at: self.log("val_loss", loss(self, batch)),
        "configure_optimizers": lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2),
    }
    return type("Classifier", (lightning.LightningModule,), own | methods)()


@right(needs="lightning")
def lightning_with_clipping_and_accumulation():
    run(classifier(), batches(), gradient_clip_val=0.1, accumulate_grad_batches=2)


@right(needs="lightning")
def lightning_with_validation_and_a_schedule():
    def configure(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    module = classifier(configure_optimizers=configure)
    run(module, batches(), batches(8), val_check_interval=1)


@right(needs="lightning")
def lightning_by_hand_with_two_optimizers():
    """`training_step` calls backward and both optimizers itself, for the body and for the head."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.body, self.head = mlp(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

        def training_step(self, batch, at):
            x, y = batch
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y))
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.body.parameters(), lr=0.1),
                torch.optim.AdamW(self.head.parameters(), lr=1e-2),
            ]

    run(Module(), batches())
