"""Trainers over an enabled model: transformers' Trainer in bf16, accumulation that warns, losses of padded samples."""

import copy
import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

import isobit
from isobit import bits
from isobit.gates.model.models import build_model
from isobit.parallel import GlobalBatch, Gradients
from tests.sweeps import mostly_full

LENGTHS = (9, 5, 12, 7, 12, 6, 8, 11)
WARNING = r"isobit\.parallel\.Gradients"


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    model = copy.deepcopy(built).train()
    isobit.enable(model)
    return model


def draw_samples():
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(1, 128, (length,), generator=generator)} for length in LENGTHS
    ]


def pad_to(width, side):
    """A collator."""

    def collate(samples):
        ids = torch.zeros(len(samples), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            at = slice(width - length, width) if side == "left" else slice(0, length)
            ids[row, at], mask[row, at] = sample["input_ids"], 1
        labels = ids.masked_fill(mask == 0, -100)
        labels[
            torch.arange(len(samples)), mask.argmax(-1)
        ] = -100  # a sample's first token is predicted by nothing
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return collate


def train(model, collate, folder, **options):
    asked = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    asked |= {
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_strategy": "no",
    }
    arguments = TrainingArguments(str(folder), **(asked | options))
    Trainer(model, arguments, data_collator=collate, train_dataset=draw_samples()).train()
    return bits.digest(model)


REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
OPTIONS = [
    {},
    REENTRANT,
    {"bf16": True},
    {"bf16": True, "gradient_checkpointing": True},
    {"bf16": True, **REENTRANT},
]


@pytest.mark.parametrize("options", mostly_full(OPTIONS, [OPTIONS[0], OPTIONS[-1]]), ids=str)
def test_padding_does_not_change_what_is_trained(built, tmp_path, options):
    digests = set()
    for width, side in ((12, "right"), (17, "right"), (14, "left")):
        model = copy.deepcopy(built)
        with isobit.enabled(model):
            digests.add(train(model, pad_to(width, side), tmp_path, **options))
    assert len(digests) == 1
    assert digests != {bits.digest(built)}


# ---- accumulation ----------------------------------------------------------------------------------------


def test_accumulation_by_a_trainer_warns_once(model, tmp_path):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.warns(UserWarning, match=WARNING) as seen:
        train(model, pad_to(12, "right"), tmp_path, **options)
    assert len([one for one in seen if "isobit" in str(one.message)]) == 1


def backward(model, rows, **named):
    batch = pad_to(12, "right")(draw_samples()[rows])
    model(**batch, use_cache=False, num_items_in_batch=62, **named).loss.backward()


def test_accumulation_by_hand_warns_whatever_is_called(model):
    backward(model, slice(0, 2))
    ids = draw_samples()[0]["input_ids"][None]
    with pytest.warns(UserWarning, match=WARNING):
        isobit.logprobs(model, ids).mean().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_per_step_does_not_warn(model, set_to_none):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            backward(model, slice(0, 4))
            with torch.no_grad():
                isobit.logprobs(model, draw_samples()[0]["input_ids"][None])
            model(draw_samples()[0]["input_ids"][None])  # no backward of it
            model.zero_grad(set_to_none=set_to_none)


def test_the_remedy_of_the_warning_gives_the_gradient_of_the_whole(model):
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(whole, slice(0, 8))
        gradients = Gradients(model, GlobalBatch(total=8, micro_batches=4))
        for micro in range(4):
            with gradients.micro_batch(micro):
                backward(model, slice(2 * micro, 2 * micro + 2))
        gradients.close()
    assert all(
        bits.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )


# ---- the loss of padded samples ---------------------------------------------------------------------------


def test_the_loss_is_of_tokens_that_follow_in_their_own_sample(built):
    """Stock predicts a left-padded sample's first token from padding; isobit leaves it out, on either side."""
    samples = draw_samples()[:4]
    right, left = (pad_to(14, side)(samples) for side in ("right", "left"))
    for batch in (right, left):  # labels of every token, as people set them
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    tokens = sum(LENGTHS[:4])
    model = copy.deepcopy(built)
    with torch.no_grad():
        stock_right = model(**right, num_items_in_batch=tokens).loss
        positions = (left["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        stock_left = model(**left, position_ids=positions, num_items_in_batch=tokens).loss
        with isobit.enabled(model):
            ours_right, ours_left = (
                model(**batch, num_items_in_batch=tokens).loss for batch in (right, left)
            )
            mean = model(**left).loss
            selected = isobit.logprobs(model, left["input_ids"], left["attention_mask"])
    assert bits.equal(ours_right, ours_left)
    torch.testing.assert_close(ours_right, stock_right)
    assert stock_left - stock_right > 0.1  # four first tokens more
    # num_items_in_batch divides as given: where it counts first tokens, the loss is smaller than the mean.
    torch.testing.assert_close(mean * (tokens - 4) / tokens, ours_left)
    torch.testing.assert_close(-selected.sum() / (tokens - 4), mean)
