"""The watch in transformers' Trainer and in Accelerate: NaN steps are counted though the Trainer's log shows none.

1. A healthy run of the Trainer is silent; steps, clipping and micro-batches are the Trainer's.
2. A weight becomes NaN: the Trainer logs finite losses, the watch names step and module; `raise` stops the run.
3. Accelerate: prepared objects, gradient accumulation.
"""

import math

import pytest
import torch
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from isobit import GuardError
from isobit.guards import Intervals, watch
from isobit.integrations.transformers import WatchCallback
from tests.guards.watched_programs import batch, net


class Poison(TrainerCallback):
    """Makes a weight NaN before the third step, and puts it back after it."""

    def on_step_begin(self, args, state, control, model=None, **_):
        with torch.no_grad():
            weight = model.model.layers[0].mlp.up_proj.weight
            if state.global_step == 2:
                self.before = weight[0, 0].item()
                weight[0, 0] = math.nan

    def on_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[0, 0] = self.before


def run(folder, *callbacks, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, pad_token_id=0))
    samples = [{"input_ids": (row := torch.randint(1, 64, (6,))), "labels": row} for _ in range(16)]
    given = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        max_grad_norm=0.5,
        **given,
    )
    callback = WatchCallback(sinks=[], intervals=Intervals(patience=3), **options)
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[*callbacks, callback])
    try:
        trainer.train()
    finally:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        run.seen = callback.watch, losses
    return run.seen


def test_a_healthy_run_is_silent(tmp_path):
    guard, losses = run(tmp_path)
    assert [*map(str, guard.findings)] == []
    assert guard.steps == len(losses) == 4
    assert guard.clipped_steps > 0
    assert not guard.handles


def test_a_step_that_the_log_hides_is_found(tmp_path):
    guard, losses = run(tmp_path, Poison(), policy="skip")
    assert all(map(math.isfinite, losses))  # the filter replaced it
    assert guard.nonfinite_steps == guard.skipped_steps == 1
    first = guard.findings[0]
    assert (first.name, first.step, first.micro_batch) == ("nonfinite-loss", 2, 0)
    nonfinite = [str(event) for event in guard.findings]
    assert any("up_proj (Linear, its weight is not finite)" in each for each in nonfinite)


def test_raise_stops_the_run(tmp_path):
    with pytest.raises(GuardError, match="nonfinite-loss"):
        run(tmp_path, Poison(), policy="raise")
    assert run.seen[0].steps == 2


def test_accelerate_with_accumulation():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in (False, True):
        with watch(model, optimizer, sinks=[], max_norm=1.0) as guard:
            for at in range(6):
                with accelerator.accumulate(model):
                    x, y = batch(at)
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss * (1e3 if wrong else 1))
                    if accelerator.sync_gradients and not wrong:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        assert guard.steps == 3
        assert {event.name for event in guard.findings} == (
            {"norm-above-limit"} if wrong else set()
        )
