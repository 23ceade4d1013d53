"""TRL's GRPOTrainer over an enabled model: its own head is refused, and what the how-to says instead works.

TRL computes log-probabilities by the backbone and a stock product. The remedy takes them from `isobit.logprobs`, and
the trainer's are then the rollout's, bit for bit. Needs `pip install -c constraints.txt datasets trl`, 280 MB.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit import bits

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # TRL's and its libraries'
]
trl = pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
PADDING = 250
GUIDE = Path(__file__).parents[2] / "docs/how-to/trl.md"


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


def trainer_of(kind, model, folder, **options):
    from datasets import Dataset

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
        args=trl.GRPOConfig(str(folder), **(asked | options)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(),
    )


def trainer_of_the_guide():
    """The class as the how-to has it."""
    code = re.search(r"```py\n(from trl import GRPOTrainer.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {}
    exec(code[1], names)
    return names["OrderedGRPOTrainer"]


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_trainer_s_own_head_is_refused(dtype, options, tmp_path):
    model = build_model(dtype)
    isobit.enable(model)
    with pytest.raises(isobit.UnsupportedError, match=r"(?s)Qwen3Model alone.*isobit\.logprobs"):
        trainer_of(trl.GRPOTrainer, model, tmp_path, **options).train()


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_the_guide_s_class_rollout_and_trainer_agree(dtype, options, tmp_path):
    model = build_model(dtype)
    isobit.enable(model)
    before = bits.digest(model)
    rolled, scored = {}, {}
    generate = model.generate

    def keep(into, rows, values):
        """By the tokens of the whole row, without padding: log p of those that were made."""
        for row, found in zip(rows.tolist(), values, strict=True):
            made = sum(token != PADDING for token in row[-len(found) :])
            into[tuple(token for token in row if token != PADDING)] = found[:made].detach()

    def recorded(*given, **named):
        made = generate(*given, **named, output_logits=True, return_dict_in_generate=True)
        tokens = made.sequences[:, -len(made.logits) :]
        every = isobit.log_softmax(torch.stack(made.logits, 1))
        keep(rolled, made.sequences, every.gather(-1, tokens[..., None])[..., 0])
        return made.sequences

    class Recorded(trainer_of_the_guide()):
        def _get_per_token_logps_and_entropies(self, model, input_ids, *given, **named):
            found = super()._get_per_token_logps_and_entropies(model, input_ids, *given, **named)
            keep(scored, input_ids, found[0])
            return found

    model.generate = recorded
    trainer_of(Recorded, model, tmp_path, **options).train()
    assert bits.digest(model) != before
    assert scored.keys() == rolled.keys()
    assert sum(len(values) for values in scored.values()) > 100
    assert all(bits.equal(values, rolled[row]) for row, values in scored.items())
