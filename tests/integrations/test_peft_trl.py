"""TRL's GRPO with LoRA: log-probabilities of rollout and trainer are equal at every step, and the base keeps its bits.

With adapters next to the weights or merged; with a reference policy, which is another adapter of the same model. TRL's
own trainer, in the same test, differs at every step.
"""

import peft
import pytest
import torch
from peft_cases import base_digest
from test_trl import PADDING, build_model, trainer_of

import isobit
from isobit import bits

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
]
trl = pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")


def wrapped(dtype, **asked):
    torch.manual_seed(1)
    config = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, **asked}
    return peft.get_peft_model(build_model(dtype), peft.LoraConfig(task_type="CAUSAL_LM", **config))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("merged", {"max_steps": 20}),
        ("beside", {"max_steps": 20}),
        ("beside", {"max_steps": 4, "beta": 0.1}),
        ("merged", {"max_steps": 4, "beta": 0.1}),
    ],
    ids=str,
)
def test_rollout_and_trainer_are_equal_at_every_step(mode, options, tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(wrapped(torch.bfloat16), adapters=mode)
    kept, before = base_digest(model), bits.digest(model)
    asked = {"logging_steps": 1, "learning_rate": 1e-3, **options}
    trainer = trainer_of(GRPOTrainer, model, tmp_path, **asked)
    trainer.train()
    print(f"\nisobit {mode} {options}: {trainer.differ} of {trainer.compared} differ")
    assert trainer.differ == 0
    assert trainer.compared > 60 * options["max_steps"]
    assert base_digest(model) == kept
    assert bits.digest(model) != before


def test_stock_differs(tmp_path):
    model = wrapped(torch.bfloat16)
    generate, rolled, counts = model.generate, {}, []

    def keep(into, rows, values):
        """By the tokens of the whole row, without padding: log p of those that were made."""
        for row, found in zip(rows.tolist(), values, strict=True):
            made = sum(token != PADDING for token in row[-len(found) :])
            into[tuple(token for token in row if token != PADDING)] = found[:made].detach()

    def recorded(*given, **named):
        made = generate(*given, **named, output_logits=True, return_dict_in_generate=True)
        tokens = made.sequences[:, -len(made.logits) :]
        every = torch.stack(made.logits, 1).log_softmax(-1)
        keep(rolled, made.sequences, every.gather(-1, tokens[..., None])[..., 0])
        return made.sequences

    class Recorded(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, *given, **named):
            found = super()._get_per_token_logps_and_entropies(model, input_ids, *given, **named)
            scored = {}
            keep(scored, input_ids, found[0])
            wrong = sum(int((v != rolled[row]).sum()) for row, v in scored.items())
            counts.append((sum(map(len, scored.values())), wrong))
            return found

    model.generate = recorded
    trainer_of(Recorded, model, tmp_path, max_steps=20, learning_rate=1e-3).train()
    compared, differ = (sum(column) for column in zip(*counts, strict=True))
    print(f"\nstock: {differ} of {compared} differ, in {len(counts)} steps")
    assert all(wrong > 0 for _, wrong in counts)


def test_adapters_that_trl_would_add_are_refused(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(build_model(torch.float32))

    def make(*given, **named):
        return GRPOTrainer(*given, **named, peft_config=peft.LoraConfig())

    with pytest.raises(isobit.UnsupportedError, match=r"(?s)peft_config.*get_peft_model"):
        trainer_of(make, model, tmp_path)


def test_dropout_is_refused_because_samples_have_no_number(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(wrapped(torch.float32, lora_dropout=0.1))
    with pytest.raises(isobit.UnsupportedError, match=r"(?s)dropout of 0\.1.*lora_dropout=0"):
        trainer_of(GRPOTrainer, model, tmp_path).train()
