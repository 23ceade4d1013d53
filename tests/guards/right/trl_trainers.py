"""Programs of TRL: supervised fine-tuning, preferences, rewards, and reinforcement by generated completions."""

import tempfile

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from tests.guards.right.program import right

WORDS, PADDING, END = 60, 60, 61
QUIET = {
    "max_steps": 4,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}


def tokenizer():
    words = {f"t{at}": at for at in range(WORDS)} | {"<pad>": PADDING, "<eos>": END, "<unk>": 62}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def small(kind=Qwen3ForCausalLM, **options):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=PADDING,
        eos_token_id=END,
        **options,
    )
    return kind(config)


def sentence(at, extra=0):
    return " ".join(f"t{(7 * at + 3 * each) % WORDS}" for each in range(4 + at % 5 + extra))


def run(trainer, arguments, model, columns, rows=24, options=None, **given):
    """Train for four steps on the columns that `columns` returns for each row."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(
            model=model,
            args=arguments(folder, **(QUIET | (options or {}))),
            train_dataset=Dataset.from_list([columns(at) for at in range(rows)]),
            processing_class=tokenizer(),
            **given,
        )
        made.remove_callback(PrinterCallback)
        made.train()


def fine_tune(columns, given=None, **options):
    from trl import SFTConfig, SFTTrainer

    options = {"per_device_train_batch_size": 2, "max_length": 32} | options
    run(SFTTrainer, SFTConfig, small(), columns, options=options, **(given or {}))


def text(at):
    return {"text": sentence(at)}


def question(at):
    return {"prompt": sentence(at), "completion": " " + sentence(at + 1)}


@right(needs="trl")
def sft():
    fine_tune(text)


@right(needs="trl")
def sft_on_completions_with_accumulation():
    fine_tune(question, gradient_accumulation_steps=2, completion_only_loss=True)


@right(needs="trl")
def sft_in_bf16_with_packing_and_lora():
    fine_tune(text, LORA, packing=True, bf16=True)


def preference(at):
    chosen, rejected = f" {sentence(at + 1)}", f" {sentence(at + 2)}"
    return {"prompt": sentence(at), "chosen": chosen, "rejected": rejected}


@right(needs="trl")
def dpo():
    from trl import DPOConfig, DPOTrainer

    size = {"per_device_train_batch_size": 2}
    run(DPOTrainer, DPOConfig, small(), preference, options=size, ref_model=small())


@right(needs="trl")
def reward_model():
    from trl import RewardConfig, RewardTrainer

    model = small(Qwen3ForSequenceClassification, num_labels=1)
    run(RewardTrainer, RewardConfig, model, preference, options={"per_device_train_batch_size": 2})


def different_words(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


def reinforce(given=None, **options):
    from trl import GRPOConfig, GRPOTrainer

    asked = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
    run(
        GRPOTrainer,
        GRPOConfig,
        small(),
        lambda at: {"prompt": sentence(at)},
        options=asked | options,
        reward_funcs=different_words,
        **(given or {}),
    )


@right(needs="trl")
def grpo():
    reinforce()


@right(needs="trl")
def grpo_against_a_reference_with_two_steps_per_generation():
    reinforce(LORA, beta=0.1, steps_per_generation=2, num_iterations=2)


@right(needs="trl")
def grpo_with_accumulation_and_recomputation():
    reinforce(gradient_accumulation_steps=2, gradient_checkpointing=True)
