"""The watch in Lightning's Trainer: gradients are judged after Lightning's closure and clipping, of the step itself."""

import pytest
import torch
from torch.utils.data import DataLoader

from isobit import GuardError

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # theirs


def fit(folder, *, poison=None, clip=0.05, **options):
    import lightning.pytorch as lightning

    from isobit.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, at):
            return self(batch * (float("nan") if at == poison else 1.0)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    callback = WatchCallback(sinks=[], **options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=clip,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    try:
        trainer.fit(Module(), DataLoader(data, batch_size=4))
    finally:
        fit.watch = callback.watches[0]
    return fit.watch


def test_a_healthy_run_is_silent(tmp_path):
    guard = fit(tmp_path)
    assert [*map(str, guard.findings)] == []
    assert guard.steps == 6
    assert guard.clipped_steps > 0
    assert not guard.handles


def test_gradients_above_the_limit(tmp_path):
    guard = fit(tmp_path, clip=None, max_norm=0.05)
    assert (guard.findings[0].name, guard.findings[0].step) == ("norm-above-limit", 0)


def test_nan_is_found_in_its_step_and_skipped(tmp_path):
    guard = fit(tmp_path, poison=3, policy="skip")
    first = guard.findings[0]
    assert (first.name, first.step) == ("nonfinite-loss", 3)
    assert "the input of the model is not finite" in first.message
    assert (guard.steps, guard.skipped_steps, guard.nonfinite_steps) == (6, 1, 1)
    with pytest.raises(GuardError, match="nonfinite-loss"):
        fit(tmp_path, poison=3, policy="raise")
    assert not fit.watch.handles
