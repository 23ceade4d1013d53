"""GRPO with LoRA and rollouts by vLLM with the merged weights: zero at every step, and the base keeps its bits.

Needs ./setup_vllm, and `pip install -c constraints.txt datasets trl`.
"""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import isobit
from isobit.integrations.vllm import Rollouts
from tests.integrations.peft_cases import base_digest
from tests.integrations.test_trl import build_model, logged, trainer_of
from tests.vllm.test_vllm_engine import rollouts as environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
    pytest.mark.skipif(not environment.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]
STEPS = 20


@pytest.mark.parametrize("engine", ["isobit", "stock"])
def test_vllm_with_merged_weights_is_the_trainer_at_every_step(engine, tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    build_model(torch.bfloat16).save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model = isobit.enable(peft.get_peft_model(base, lora), adapters="merged")
    kept = base_digest(model)
    options = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3}
    with Rollouts(model, environment.PYTHON, max_model_len=64, engine=engine) as rollouts:
        trainer = trainer_of(GRPOTrainer, model, tmp_path, rollouts, **options)
        trainer.train()
    differ = logged(trainer, "isobit/rollout_logprobs_differ")
    print(f"\n{engine}: {trainer.differ} of {trainer.compared} differ")
    assert len(differ) == STEPS
    assert trainer.compared > 60 * STEPS
    assert all((value == 0) is (engine == "isobit") for value in differ)
    assert base_digest(model) == kept
