"""TRL's RewardTrainer over an enabled model: one result for every division of a step into micro-batches.

With TRL's own trainer and stock operators, the weights differ after the first step.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import isobit
from isobit import bits
from isobit.integrations.trl.reward import as_pairs, pair_terms


def test_the_loss_of_a_pair_is_stock_s_and_does_not_depend_on_its_place():
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 37, generator=generator)
    found = pair_terms(chosen, rejected, margin)
    torch.testing.assert_close(found, -F.logsigmoid(chosen - rejected - margin))
    alone = torch.cat(
        [
            pair_terms(*p)
            for p in zip(*(t.split(1) for t in (chosen, rejected, margin)), strict=True)
        ]
    )
    assert bits.equal(found, alone)
    assert float(pair_terms(torch.tensor([-300.0]), torch.tensor([300.0]))) == 600.0


def test_the_texts_of_a_pair_become_neighbours():
    given = {
        "input_ids": torch.tensor([[1], [2], [3], [-1], [-2], [-3]]),
        "margin": torch.tensor([0.1, 0.2, 0.3]),
        "use_cache": False,
    }
    found = as_pairs(given)
    assert found["input_ids"].flatten().tolist() == [1, -1, 2, -2, 3, -3]
    assert found["margin"] is given["margin"]


def model_of(dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3Config(vocab_size=64, **sizes, **heads, num_labels=1)
    make = transformers.AutoModelForSequenceClassification.from_config
    return make(config, dtype=dtype)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(61)} | {"<pad>": 61, "<eos>": 62, "<unk>": 63}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def trained(kind, model, folder, size, steps, **options):
    """Train for two steps of four pairs, and return weights and log."""
    import trl
    from datasets import Dataset

    generator = torch.Generator().manual_seed(3)
    texts = [
        " ".join(f"t{i}" for i in torch.randint(0, 61, (3 + at % 9,), generator=generator))
        for at in range(16)
    ]
    args = trl.RewardConfig(
        str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        max_steps=2,
        learning_rate=1e-3,
        optim="adamw_torch",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        **options,
    )
    trainer = kind(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict({"chosen": texts[:8], "rejected": texts[8:]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return bits.digest(model), trainer.state.log_history


@pytest.mark.full
@pytest.mark.usefixtures("no_vllm")
@pytest.mark.filterwarnings("ignore")
def test_every_division_of_a_step_trains_the_same_weights(tmp_path):
    trl = pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
    from isobit.integrations.trl import RewardTrainer

    model = model_of(torch.bfloat16)
    divisions = ((4, 1), (2, 2), (1, 4))
    options = {"center_rewards_coefficient": 0.01}
    stock = {
        trained(trl.RewardTrainer, copy.deepcopy(model), tmp_path, *division, **options)[0]
        for division in divisions[:2]
    }
    assert len(stock) == 2  # the control
    isobit.enable(model)
    found = [
        trained(RewardTrainer, copy.deepcopy(model), tmp_path, *division, **options)
        for division in divisions
    ]
    assert len({digest for digest, _ in found}) == 1
    assert found[0][0] != bits.digest(model)
    first = found[0][1][0]
    assert {"loss", "accuracy", "margin", "mean_reward"} <= set(first)
    assert 0.5 < first["loss"] < 1.0  # log 2, before the first update


@pytest.mark.full
@pytest.mark.usefixtures("no_vllm")
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_not_enabled_is_an_error(tmp_path):
    pytest.importorskip("trl", reason="pip install -c constraints.txt datasets trl")
    from isobit.integrations.trl import RewardTrainer

    with pytest.raises(isobit.UnsupportedError, match="an enabled model"):
        trained(RewardTrainer, model_of(torch.float32), tmp_path, 2, 1)
