"""Bugs around the loop: loaders, loading of weights, the Trainer's counting, generation, wrappers."""

import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from isobit.guards import check_loader, same_attributes
from isobit.integrations.transformers import WatchCallback
from tests.guards.bugs.bug import Found, planted, quiet
from tests.guards.bugs.on_one_rank import loop, sgd
from tests.guards.watched_programs import net, train


class Noise(Dataset):
    """Items with random numbers of NumPy."""

    def __len__(self):
        return 16

    def __getitem__(self, at):
        return np.random.rand(4)


def one_seed(worker):
    np.random.seed(0)


@planted(
    "SO-67180955",
    "20",
    "workers of a DataLoader share a seed",
    "check",
    Found("workers-alike"),
)
def workers_share_a_seed(wrong):
    return check_loader(
        DataLoader(Noise(), batch_size=2, num_workers=2, worker_init_fn=one_seed if wrong else None)
    )


@planted(
    "transformers-34204", "20", "a processor returns a batch of 1", "check", Found("item-lost")
)
def processor_returns_one(wrong):
    items = [torch.full((3,), float(at)) for at in range(8)]
    return check_loader(
        DataLoader(items, 4, collate_fn=lambda given: torch.stack(given[:1] if wrong else given))
    )


@planted(
    "transformers-17877",
    "20",
    "loaded weights are initialised again",
    "watch",
    Found("weights-not-loaded", 0),
)
def initialised_again(wrong):
    checkpoint = net(seed=3).state_dict()
    model = net()
    model.load_state_dict(checkpoint)
    if wrong:
        model[2].reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return train(quiet(model, optimizer, weights_from=checkpoint), model, optimizer)


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, pad_token_id=0, eos_token_id=None))


def run_trainer(*callbacks, **options):
    """Train on 12 samples in 2 epochs of 3 steps; return the watch."""
    samples = [{"input_ids": (row := torch.randint(1, 64, (6,))), "labels": row} for _ in range(12)]
    watching = WatchCallback(sinks=[])
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(
            tiny_model(), arguments, train_dataset=samples, callbacks=[*callbacks, watching]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watching.watch


class Miscounts(TrainerCallback):
    """Counts micro-batches of a step twice, so that training stops early."""

    def on_train_begin(self, args, state, control, **_):
        state.max_steps //= args.gradient_accumulation_steps


@planted(
    "transformers-33455",
    "20",
    "steps are miscounted, training stops early",
    "watch",
    Found("steps-miscounted", 0),
)
def steps_miscounted(wrong):
    return run_trainer(*([Miscounts()] if wrong else []))


class InfiniteWeight(TrainerCallback):
    """A weight is infinite in the second step, and only then."""

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            self.kept = model.lm_head.weight.data[0, 0].item()
            model.lm_head.weight.data[0, 0] = float("inf")

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step == 1:
            model.lm_head.weight.data[0, 0] = self.kept
            model.zero_grad()


@planted(
    "trl-6702",
    "more",
    "a NaN loss is logged as a finite one",
    "watch",
    Found("nonfinite-loss", 1),
)
def nan_hidden_by_the_log(wrong):
    return run_trainer(*([InfiniteWeight()] if wrong else []), logging_steps=1)


class Generating(nn.Module):
    """Generates too many tokens between steps."""

    def __init__(self, wrong):
        super().__init__()
        self.net, self.wrong = net(), wrong

    def forward(self, x):
        return self.net(x)

    def generate(self, ids, max_new_tokens):
        extra = max_new_tokens + 3 if self.wrong else max_new_tokens
        return torch.cat([ids, ids.new_zeros(len(ids), extra)], 1)


@planted(
    "transformers-23723",
    "20",
    "generate exceeds max_new_tokens",
    "preflight",
    Found("generated-too-much"),
)
def too_many_tokens(wrong):
    model = Generating(wrong)

    def sample(step):
        model.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=4)

    loop(model, sgd(model), after=sample)


@planted(
    "deepspeed-6772",
    "new",
    "a wrapper overwrites an attribute of the user's modules",
    "check",
    Found("attribute-overwritten"),
)
def overwritten_attribute(wrong):
    model = net()
    model[0].id = "encoder"
    with same_attributes(model) as found:
        for at, module in enumerate(model.modules()):
            if wrong:
                module.id = at
            else:
                module.ds_id = at
    return found
