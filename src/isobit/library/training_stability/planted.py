"""Planted wrong training programs: each is `Program` with one part replaced by a mistake that people make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isobit import optim
from isobit.library.training_stability.program import SLOPE, Model, Program, plan_of

Train = Callable[..., Program]


def trains(kind: type[Program]) -> Train:
    """Return the function that trains with a program."""

    def train(drawn: Tensor, steps: int = 1, **more: Any) -> Program:
        return kind(plan_of(drawn, steps, **more)).train()

    return train


class WithModel(Program):
    """A program with another model."""

    kind: type[Model] = Model

    def make_model(self) -> nn.Module:
        return self.kind(self.plan.layers, self.plan.gain)


# ---- numbers that are not finite ---------------------------------------------------------------------------


class HalfPrecision(Program):
    """Weights of 16 bits and no scaler: the denominator of torch's AdamW rounds to zero."""

    def make_model(self) -> nn.Module:
        return super().make_model().half()

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept = super().make_optimizer(parameters).defaults
        return torch.optim.AdamW(
            parameters, **{name: kept[name] for name in ("lr", "betas", "eps", "weight_decay")}
        )


class LogOfZero(WithModel):
    """A logarithm of zero in the loss of one step."""

    class kind(Model):
        calls = 0

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            found = super().forward(tokens)["loss"]
            return {"loss": found if self.calls != 51 else found * (found * 0).log()}


class TooHighRate(Program):
    """Plain descent with a rate that is too high, and no clipping."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e4)

    def clip(self) -> None:
        pass


# ---- clipping ----------------------------------------------------------------------------------------------


class Unclipped(Program):
    """No clipping: the configuration's limit is ignored."""

    def clip(self) -> None:
        pass


class EmbeddingUnclipped(Program):
    """Clipping leaves out the embedding, whose optimizer is elsewhere."""

    def clip(self) -> None:
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("embed.")]
        optim.clip_grad_norm_(rest, self.config["max_grad_norm"])


class ClippedTooSoon(Program):
    """Clipping before the last micro-batch is added."""

    def backward(self, tokens: Tensor, step: int, shares: int) -> float:
        super().clip()
        return super().backward(tokens, step, shares)

    def clip(self) -> None:
        pass


class StockClipping(Program):
    """torch's clipping, whose norm overflows in fp32: all gradients become zero, and nothing is learnt."""

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["max_grad_norm"])


# ---- hyperparameters ---------------------------------------------------------------------------------------


class EmbeddingByDefaults(Program):
    """The embedding's optimizer has the library's beta2 and weight decay."""

    def make_embedding_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.AdamW(parameters, lr=self.config["learning_rate"])


class WithoutDecay(Program):
    """The weight decay of the configuration is forgotten."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.config = self.config | {"weight_decay": 0.0}
        return super().make_optimizer(parameters)


class OtherEpsilon(Program):
    """eps comes from another framework's default."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.config = self.config | {"adam_epsilon": 1e-6}
        return super().make_optimizer(parameters)


# ---- learning rate -----------------------------------------------------------------------------------------


class WithoutWarmup(Program):
    """The schedule has no warm-up."""

    def share_of_peak(self, step: int) -> float:
        return 1.0 if step < self.config["warmup_steps"] else super().share_of_peak(step)


class AdvancesPerMicroBatch(Program):
    """The schedule advances once per micro-batch."""

    def advance(self) -> None:
        for _ in range(self.plan.shares):
            super().advance()


class EndsEarly(Program):
    """The data ends before the steps do, as in C-TRAINCFG-001."""

    def steps(self) -> int:
        return self.plan.steps * 43 // 100


# ---- state of the optimizer --------------------------------------------------------------------------------


class NotInitialized(Program):
    """The state is allocated before the first step, and has what was in memory."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        made = super().make_optimizers()
        for parameter in made[-1].param_groups[0]["params"]:
            made[-1].state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": parameter.detach().abs().clone(),
            }
        return made


class FirstMomentOfWeights(NotInitialized):
    """As if a first moment had the memory of weights, and counted one step: no guard on zeros sees that alone."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        made = super().make_optimizers()
        for parameter, state in made[-1].state.items():
            state["step"] = torch.tensor(1.0)
            state["exp_avg"] = parameter.detach().clone()
        return made


class WeightsOnly(Program):
    """A resume loads the weights alone."""

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])


class StateOf16Bits(Program):
    """A checkpoint keeps the optimizer's state in bfloat16."""

    def checkpoint(self) -> dict[str, Any]:
        saved = super().checkpoint()
        for states in (each["state"].values() for each in saved["optimizers"]):
            for state in states:
                state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()
        return saved


# ---- gradient flow -----------------------------------------------------------------------------------------


class Detached(WithModel):
    """The embeddings are detached in the forward."""

    class kind(Model):
        def hidden(self, found: Tensor) -> Tensor:
            return super().hidden(found.detach())


class DeadBranch(WithModel):
    """A layer is multiplied by zero."""

    class kind(Model):
        def hidden(self, found: Tensor) -> Tensor:
            for block in self.blocks:
                found = found + 0 * block(found)
            return found


class WeightWithoutDerivative(WithModel):
    """A layer's weight has the right value in the forward and a gradient of zero; its bias learns."""

    class kind(Model):
        def hidden(self, found: Tensor) -> Tensor:
            for block in self.blocks:
                weight: Any = block.weight
                bias: Any = block.bias
                kept = weight.detach() + 0 * weight
                found = nn.functional.leaky_relu(nn.functional.linear(found, kept, bias), SLOPE)
            return found


class UnusedLayer(WithModel):
    """A layer is created and not called."""

    class kind(Model):
        def hidden(self, found: Tensor) -> Tensor:
            for block in list(self.blocks)[1:]:
                found = nn.functional.leaky_relu(block(found))
            return found


class ForgottenHead(Program):
    """The head is in no optimizer."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return super().make_optimizer(parameters[:-2])


# ---- curves ------------------------------------------------------------------------------------------------


class WrongSign(Program):
    """From the middle on, the gradient has the wrong sign."""

    def loss(self, tokens: Tensor, step: int) -> Tensor:
        found = super().loss(tokens, step)
        return found if step < self.plan.steps // 3 else 2 * found.detach() - found


class OtherData(Program):
    """From the middle on, the targets are those of other tokens."""

    def take_step(self, step: int) -> None:
        if step == self.plan.steps // 3:
            with torch.no_grad():
                weight = self.embedding().get_parameter("weight")
                weight.copy_(weight.roll(3, 0))
            self.config = self.config | {"learning_rate": 0.0}
            for group in self.optimizers[0].param_groups:
                group["initial_lr"] = 0.0
            self.schedules[0].base_lrs = [0.0]
        super().take_step(step)


class LimitOf100(Program):
    """Clipping by another limit than the configuration's."""

    def clip(self) -> None:
        optim.clip_grad_norm_(self.model.parameters(), 100.0)


half_precision = trains(HalfPrecision)
log_of_zero = trains(LogOfZero)
too_high_rate = trains(TooHighRate)
unclipped = trains(Unclipped)
embedding_unclipped = trains(EmbeddingUnclipped)
clipped_too_soon = trains(ClippedTooSoon)
stock_clipping = trains(StockClipping)
embedding_by_defaults = trains(EmbeddingByDefaults)
without_decay = trains(WithoutDecay)
other_epsilon = trains(OtherEpsilon)
without_warmup = trains(WithoutWarmup)
advances_per_micro_batch = trains(AdvancesPerMicroBatch)
ends_early = trains(EndsEarly)
not_initialized = trains(NotInitialized)
first_moment_of_weights = trains(FirstMomentOfWeights)
weights_only = trains(WeightsOnly)
state_of_16_bits = trains(StateOf16Bits)
detached = trains(Detached)
dead_branch = trains(DeadBranch)
weight_without_derivative = trains(WeightWithoutDerivative)
unused_layer = trains(UnusedLayer)
forgotten_head = trains(ForgottenHead)
wrong_sign = trains(WrongSign)
other_data = trains(OtherData)
limit_of_100 = trains(LimitOf100)
