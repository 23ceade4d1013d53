"""TRL's GRPOTrainer over an enabled model: its own head is refused; isobit.integrations.trl is zero at every step.

TRL computes log-probabilities by the backbone and a stock product, so they differ from the rollout's at every step.
isobit's trainer takes them from `isobit.logprobs`, and they are the rollout's, bit for bit, also with top-p.

Needs `pip install -c constraints.txt datasets trl`, 280 MB.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit import bits

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
]
trl = pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
PADDING = 250

# What the error names: who called, and the trainer that works.
NAMED = r"(?s)Qwen3Model alone.*isobit\.integrations\.trl\.GRPOTrainer.*isobit\.logprobs"


def build_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(250)} | {"<pad>": 250, "<eos>": 251, "<unk>": 252}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build_model(dtype):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen3Config(
        vocab_size=256,
        **sizes,
        num_key_value_heads=1,
        head_dim=64,
        pad_token_id=250,
        eos_token_id=251,
    )
    return Qwen3ForCausalLM(config).to(dtype)


def trainer_of(kind, model, folder, rollouts=None, config=None, **options):
    from datasets import Dataset

    more = {} if rollouts is None else {"rollouts": rollouts}

    prompts = [" ".join(f"t{(7 * i + j) % 250}" for j in range(3 + i % 5)) for i in range(32)]
    asked = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 2,
    }
    asked |= {
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
    }
    return kind(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        args=(config or trl.GRPOConfig)(str(folder), **(asked | options)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(),
        **more,
    )


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_trainer_s_own_head_is_refused(dtype, options, tmp_path):
    model = build_model(dtype)
    isobit.enable(model)
    with pytest.raises(isobit.UnsupportedError, match=NAMED):
        trainer_of(trl.GRPOTrainer, model, tmp_path, **options).train()


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"max_steps": 40}),
        (torch.float32, {"max_steps": 40}),
        (torch.bfloat16, {"max_steps": 40, "temperature": 0.8, "top_p": 0.9, "top_k": 60}),
        (torch.float32, {"max_steps": 4, "bf16": True}),
        (torch.bfloat16, {"max_steps": 4, "steps_per_generation": 2}),
    ],
    ids=str,
)
def test_rollout_and_trainer_are_equal_at_every_step(dtype, options, tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(build_model(dtype))
    before = bits.digest(model)
    trainer = trainer_of(
        GRPOTrainer, model, tmp_path, logging_steps=1, learning_rate=1e-4, **options
    )
    trainer.train()
    compared = logged(trainer, "isobit/rollout_logprobs_compared")
    differ = logged(trainer, "isobit/rollout_logprobs_differ")
    print(f"\nisobit {dtype} {options}: {trainer.differ} of {trainer.compared} differ")
    assert trainer.differ == 0
    assert trainer.compared > 60 * options["max_steps"] / options.get("steps_per_generation", 1)
    assert set(differ) == {0.0}
    if "steps_per_generation" not in options:
        assert len(compared) == options["max_steps"]
    assert all(value > 0 for value in logged(trainer, "entropy"))
    assert bits.digest(model) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_stock_differs(dtype, tmp_path):
    model = build_model(dtype)
    generate, rolled, counts = model.generate, {}, []

    def recorded(*given, **named):
        made = generate(*given, **named, output_logits=True, return_dict_in_generate=True)
        tokens = made.sequences[:, -len(made.logits) :]
        every = torch.stack(made.logits, 1).log_softmax(-1)
        keep(rolled, made.sequences, every.gather(-1, tokens[..., None])[..., 0])
        return made.sequences

    def keep(into, rows, values):
        """By the tokens of the whole row, without padding: log p of those that were made."""
        for row, found in zip(rows.tolist(), values, strict=True):
            made = sum(token != PADDING for token in row[-len(found) :])
            into[tuple(token for token in row if token != PADDING)] = found[:made].detach()

    class Recorded(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, *given, **named):
            found = super()._get_per_token_logps_and_entropies(model, input_ids, *given, **named)
            scored = {}
            keep(scored, input_ids, found[0])
            wrong = sum(int((v != rolled[row]).sum()) for row, v in scored.items())
            counts.append((sum(map(len, scored.values())), wrong))
            return found

    model.generate = recorded
    trainer_of(Recorded, model, tmp_path, max_steps=40, learning_rate=1e-4).train()
    compared, differ = (sum(column) for column in zip(*counts, strict=True))
    print(
        f"\nstock {dtype}: {differ} of {compared} differ, in {sum(w > 0 for _, w in counts)} of {len(counts)} steps"
    )
    assert len(counts) == 40
    assert all(wrong > 0 for _, wrong in counts)


@pytest.mark.parametrize(
    "options",
    [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"generation_kwargs": {"num_beams": 2}}],
    ids=str,
)
def test_policies_that_are_not_scored_are_refused(options, tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    model = isobit.enable(build_model(torch.float32))
    with pytest.raises(isobit.UnsupportedError, match=next(iter(options))):
        trainer_of(GRPOTrainer, model, tmp_path, **options)


def test_a_model_that_is_not_enabled_is_refused(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    with pytest.raises(isobit.UnsupportedError, match=r"isobit\.enable"):
        trainer_of(GRPOTrainer, build_model(torch.float32), tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_micro_batches_do_not_matter(dtype, tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    def train(kind, size, accumulation):
        model = build_model(dtype)
        options = {"per_device_train_batch_size": size, "learning_rate": 1e-3}
        options |= {"gradient_accumulation_steps": accumulation}
        if kind is GRPOTrainer:
            isobit.enable(model)
        trainer_of(kind, model, tmp_path, **options).train()
        return bits.digest(model)

    layouts = [(8, 1), (4, 2), (2, 4)]
    assert len({train(GRPOTrainer, *layout) for layout in layouts}) == 1
    assert len({train(trl.GRPOTrainer, *layout) for layout in layouts}) > 1


def launch(size, accumulation):
    """Return what each of two ranks printed."""
    worker = Path(__file__).with_name("grpo_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(worker), str(size), str(accumulation)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("digest")]


def test_ranks_train_one_model():
    runs = [launch(4, 1), launch(2, 2)]
    for found in runs:
        assert len(found) == 2
        assert all(differ == "0" and int(compared) > 60 for _, differ, compared in found)
    assert len({digest for found in runs for digest, *_ in found}) == 1


def test_the_reference_model_of_beta_is_enabled(tmp_path):
    from isobit.integrations.trl import GRPOTrainer

    build_model(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    reference = copy.deepcopy(model)
    trainer = trainer_of(
        GRPOTrainer, isobit.enable(model), tmp_path, beta=0.1, logging_steps=1, learning_rate=1e-3
    )
    trainer.train()
    divergences = logged(trainer, "kl")
    assert divergences[0] == 0.0 < divergences[1]
    assert trainer.differ == 0 < trainer.compared
    assert bits.digest(trainer.ref_model) == bits.digest(reference) != bits.digest(model)


def test_rloo_takes_the_same_scores(tmp_path):
    from isobit.integrations.trl import OrderedGRPO

    class Mine(OrderedGRPO, trl.RLOOTrainer):
        pass

    build_model(torch.bfloat16).save_pretrained(tmp_path / "model")
    found = set()
    for size, accumulation in ((8, 1), (4, 2)):
        model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        options |= {"beta": 0.05, "learning_rate": 1e-3, "config": trl.RLOOConfig}
        trainer = trainer_of(Mine, isobit.enable(model), tmp_path, **options)
        trainer.train()
        assert trainer.differ == 0 < trainer.compared
        found.add(bits.digest(model))
    assert len(found) == 1
