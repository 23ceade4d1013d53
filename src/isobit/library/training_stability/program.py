"""A small training program with AdamW, clipping and a schedule, in parts that planted programs replace."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from isobit import optim
from isobit.guards import Resume, Watch, state_digest, watch

VOCABULARY, WIDTH, SLOPE = 32, 16, 0.5


@dataclass(frozen=True)
class Plan:
    """What a program is asked to train.

    Attributes:
        tokens: The data: [sequences, tokens].
        steps: Steps of the run.
        layers: Linear layers between embedding and head.
        gain: How much a layer amplifies at its random initialization.
        offloaded: Whether the embedding has an optimizer of its own, as offloaded parameters do.
        shares: Micro-batches per step.
        resume_at: The step at which the run is saved and resumed; None for a run in one piece.
        seed: Of the weights.
    """

    tokens: Tensor
    steps: int
    layers: int = 2
    gain: float = 1.0
    offloaded: bool = False
    shares: int = 2
    resume_at: int | None = None
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, by the names of transformers' TrainingArguments."""
        return {
            "learning_rate": 3e-3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(self.steps // 10, 1),
            "max_steps": self.steps,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-9,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }


class Model(nn.Module):
    """An embedding, linear layers and a head that learns a number per token."""

    def __init__(self, layers: int, gain: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1)
        for block in self.blocks:
            nn.init.normal_(block.weight, std=gain / math.sqrt(WIDTH))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the mean distance from the targets; its gradient never vanishes."""
        found = self.hidden(self.embed(tokens))
        targets = (tokens % 7).to(found.dtype) / 7
        return {"loss": (self.head(found).squeeze(-1) - targets).abs().mean()}

    def hidden(self, found: Tensor) -> Tensor:
        """Return what the layers make of the embeddings: [..., WIDTH]."""
        for block in self.blocks:
            found = nn.functional.leaky_relu(block(found), SLOPE)
        return found


class Program:
    """A training program. It is right; planted ones replace one of its parts.

    Attributes:
        log: What the program logs: step, loss, norm after clipping, learning rate.
        watches: After a resume, a watch per optimizer that compares its state with the checkpoint.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.config = plan, plan.config
        self.log: list[dict[str, float]] = []
        self.watches: list[Watch] = []

    def train(self) -> Program:
        """Train for the steps of the plan."""
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.plan.seed)
            self.start()
            try:
                for step in range(self.steps()):
                    if step == self.plan.resume_at:
                        self.resume(step)
                    self.take_step(step)
            finally:
                for each in self.watches:
                    each.close()
        return self

    def steps(self) -> int:
        """Return the steps that are taken."""
        return self.plan.steps

    def start(self) -> None:
        """Create model, optimizers and schedules."""
        self.model = self.make_model()
        self.optimizers = self.make_optimizers()
        self.schedules = [LambdaLR(each, self.share_of_peak) for each in self.optimizers]

    def make_model(self) -> nn.Module:
        """Return the model."""
        return Model(self.plan.layers, self.plan.gain)

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return an optimizer of all parameters, or one of the embedding and one of the rest."""
        if not self.plan.offloaded:
            return [self.make_optimizer(list(self.model.parameters()))]
        own = list(self.embedding().parameters())
        rest = [p for p in self.model.parameters() if all(p is not q for q in own)]
        return [self.make_optimizer(rest), self.make_embedding_optimizer(own)]

    def embedding(self) -> nn.Module:
        """Return the embedding."""
        return self.model.get_submodule("embed")

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with what the configuration says."""
        config = self.config
        return optim.AdamW(
            parameters,
            lr=config["learning_rate"],
            betas=(config["adam_beta1"], config["adam_beta2"]),
            eps=config["adam_epsilon"],
            weight_decay=config["weight_decay"],
        )

    def make_embedding_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the other path."""
        return self.make_optimizer(parameters)

    def share_of_peak(self, step: int) -> float:
        """Return the learning rate of a step as a share of its peak: linear warm-up, then a cosine."""
        warmup, steps = self.config["warmup_steps"], self.config["max_steps"]
        if step < warmup:
            return float(step / warmup)
        return (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1))) / 2

    def take_step(self, step: int) -> None:
        """Train on the data once: micro-batches, clipping, optimizers, schedules."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        shares = self.plan.tokens.roll(step, 0).chunk(self.plan.shares)
        loss = sum(self.backward(share, step, len(shares)) for share in shares)
        self.clip()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])))
        rate = self.optimizers[0].param_groups[0]["lr"]
        self.log.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate})
        for optimizer in self.optimizers:
            optimizer.step()
        self.advance()

    def backward(self, tokens: Tensor, step: int, shares: int) -> float:
        """Add the gradients of one micro-batch; return its share of the loss."""
        loss: Tensor = self.loss(tokens, step) / shares
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        """Return the loss of a micro-batch."""
        found: Tensor = self.model(tokens)["loss"]
        return found

    def clip(self) -> None:
        """Scale all gradients so that their norm is at most the limit."""
        optim.clip_grad_norm_(self.model.parameters(), self.config["max_grad_norm"])

    def advance(self) -> None:
        """Set the learning rate of the next step."""
        for schedule in self.schedules:
            schedule.step()

    def resume(self, step: int) -> None:
        """Save the run, start again as a new process would, load, and watch."""
        file, digests = io.BytesIO(), [state_digest(each) for each in self.optimizers]
        torch.save(self.checkpoint(), file)
        self.start()
        self.load(torch.load(io.BytesIO(file.getvalue())))
        self.watches = [
            watch(self.model, optimizer, sinks=[], resume=Resume(step, digest))
            for optimizer, digest in zip(self.optimizers, digests, strict=True)
        ]

    def checkpoint(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedules": [each.state_dict() for each in self.schedules],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a checkpoint."""
        self.model.load_state_dict(saved["model"])
        for name, parts in (("optimizers", self.optimizers), ("schedules", self.schedules)):
            for part, state in zip(parts, saved[name], strict=True):
                part.load_state_dict(state)  # type: ignore[attr-defined]


def plan_of(drawn: Tensor, steps: int, **more: Any) -> Plan:
    """Return a plan whose tokens are made of drawn numbers: [sequences, tokens]."""
    return Plan((drawn.float() * 8).floor().long() % VOCABULARY, steps, **more)


def train(drawn: Tensor, steps: int = 1, **more: Any) -> Program:
    """Train with isobit's AdamW and clipping, on tokens that are drawn, as `Plan` says."""
    return Program(plan_of(drawn, steps, **more)).train()
