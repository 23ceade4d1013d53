"""TRL's GRPOTrainer with rollouts by vLLM in another process: zero at every step; the stock engine is the control.

vLLM draws what transformers' generate() draws, so training with either gives one model. Needs ./setup_vllm, and
`pip install -c constraints.txt datasets trl`.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

import isobit
from isobit import bits
from isobit.integrations.vllm import Rollouts
from tests.integrations.test_trl import build_model, logged, trainer_of
from tests.vllm.test_vllm_engine import rollouts as environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
    pytest.mark.skipif(not environment.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]
STEPS = 10
OPTIONS = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-4}
# Stock vLLM reports log p before them, and keeps other tokens: isobit.logprobs names those that it would not keep.
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 60}


def train(folder, dtype, engine, options=None):
    """Return the trainer after training with rollouts by vLLM, or by the model itself where there is no engine."""
    from isobit.integrations.trl import GRPOTrainer

    build_model(dtype).save_pretrained(folder)
    # .to(dtype) rounds rotary frequencies, from_pretrained does not.
    model = isobit.enable(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
    if options is None:
        options = OPTIONS if engine == "stock" else OPTIONS | TRUNCATED
    if engine is None:
        trainer = trainer_of(GRPOTrainer, model, folder, **options)
        trainer.train()
        return trainer
    with Rollouts(model, environment.PYTHON, max_model_len=64, engine=engine) as rollouts:
        trainer = trainer_of(GRPOTrainer, model, folder, rollouts, **options)
        trainer.train()
    differ = logged(trainer, "isobit/rollout_logprobs_differ")
    print(
        f"\n{engine} {dtype}: {trainer.differ} of {trainer.compared} differ, "
        f"in {sum(value > 0 for value in differ)} of {len(differ)} steps"
    )
    assert len(differ) == STEPS
    return trainer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rollouts_by_vllm_are_the_trainers_at_every_step(dtype, tmp_path):
    trainer = train(tmp_path / "vllm", dtype, "isobit")
    assert trainer.compared > 60 * STEPS
    assert set(logged(trainer, "isobit/rollout_logprobs_differ")) == {0.0}
    assert bits.digest(trainer.model) != bits.digest(build_model(dtype))
    alone = train(tmp_path / "model", dtype, None)
    assert bits.digest(trainer.model) == bits.digest(alone.model)


def test_stock_vllm_differs_at_every_step(tmp_path):
    trainer = train(tmp_path, torch.bfloat16, "stock")
    assert all(value > 0 for value in logged(trainer, "isobit/rollout_logprobs_differ"))


def test_weights_that_are_not_updated_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(Rollouts, "update_weights", lambda *_: None)
    # Without top-k and top-p: older weights may draw a token that the trainer does not keep, which is an error.
    trainer = train(tmp_path, torch.bfloat16, "isobit", OPTIONS)
    first, *later = logged(trainer, "isobit/rollout_logprobs_differ")
    assert first == 0
    assert all(value > 0 for value in later)


def test_trls_own_way_to_vllm_is_refused(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(build_model(torch.bfloat16))
    with pytest.raises(isobit.UnsupportedError, match=r"(?s)use_vllm=True.*rollouts="):
        trainer_of(GRPOTrainer, model, tmp_path, use_vllm=True)


def test_autocast_is_refused(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(build_model(torch.float32))
    with pytest.raises(isobit.UnsupportedError, match="mixed precision 'bf16'"):
        trainer_of(GRPOTrainer, model, tmp_path, rollouts=object(), bf16=True)
