"""Programs of transformers, PEFT and Accelerate."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from tests.guards.bugs.around_the_loop import tiny_model
from tests.guards.right.networks import mlp
from tests.guards.right.program import ids, rand, right


def samples(count=12):
    rows = [ids(at, 6, below=60) + 1 for at in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def run_trainer(model, data, kind=Trainer, **options):
    given = {"optimizers": options.pop("optimizers")} if "optimizers" in options else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        made = kind(model, arguments, train_dataset=data, eval_dataset=data[:4], **given)
        made.remove_callback(PrinterCallback)
        made.train()


@right
def trainer():
    run_trainer(tiny_model(), samples())


@right
def trainer_with_accumulation_and_evaluation():
    more = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    run_trainer(tiny_model(), samples(), **more)


@right
def trainer_in_bf16_with_recomputation():
    run_trainer(tiny_model(), samples(), bf16=True, gradient_checkpointing=True)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())


@right
def trainer_with_a_loss_and_optimizer_of_its_own():
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run_trainer(model, samples(), OwnLoss, optimizers=(optimizer, schedule))


@right
def trainer_with_lora():
    targets = ["q_proj", "v_proj"]
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=targets))
    run_trainer(model, samples())


@right
def trainer_that_classifies_with_frozen_embeddings():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    model = BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)
    data = [{"input_ids": ids(at, 6, below=60), "labels": at % 3} for at in range(12)]
    run_trainer(model, data)


def accelerator_of(**options):
    """Accelerate has one state per process, which other programs have set."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


@right
def accelerate_loop():
    accelerator = accelerator_of()
    model = mlp(8, 16, 4)
    data = DataLoader([(rand(at, 8), at % 4) for at in range(16)], batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.Adam(model.parameters()), data)
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()


@right
def accelerate_with_accumulation_clipping_and_a_schedule():
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for at in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(model(rand(at, 4, 8)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@right
def accelerate_with_two_models():
    accelerator = accelerator_of(mixed_precision="bf16")
    first, second = accelerator.prepare(mlp(8, 16, 8), mlp(8, 4))
    optimizer = accelerator.prepare(
        torch.optim.AdamW(nn.ModuleList([first, second]).parameters(), lr=1e-3)
    )
    for step in range(4):
        optimizer.zero_grad()
        accelerator.backward(second(first(rand(step, 4, 8))).float().square().mean())
        optimizer.step()
