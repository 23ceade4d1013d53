"""TRL's RewardTrainer over an enabled model: one result for every number of micro-batches and ranks.

[Note: pairs] TRL puts the chosen texts of a batch before all rejected ones, and takes the mean of −log σ(difference)
with stock operators. The samples of a step would then have another order for every number of micro-batches. Here the
two texts of a pair are neighbours, so that the samples of the global batch have one order however it is divided. The
terms −log σ(z) are −log_softmax of (z, 0), and their sum is exact, divided by the number of pairs of the step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.integrations.trl.refusals import refuse_later_adapters, refuse_liger, stock_trainer
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.loss import divisor

if TYPE_CHECKING:
    RewardTrainer = Any


def pair_terms(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Return −log σ(chosen − rejected − margin) of each pair, in fp32."""
    apart = chosen.float() - rejected.float()
    if margin is not None:
        apart = apart - margin.float()
    both = torch.stack((apart, torch.zeros_like(apart)), dim=-1)
    return -log_softmax(both).select(-1, 0)


def as_pairs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's batch, n chosen texts and then n rejected ones, with the two texts of each pair as neighbours."""
    rows = len(inputs["input_ids"])
    order = torch.arange(rows).reshape(2, rows // 2).t().reshape(-1)
    return {
        name: value[order.to(value.device)]
        if isinstance(value, Tensor) and value.dim() and len(value) == rows and name != "margin"
        else value
        for name, value in inputs.items()
    }


def known_outputs(outputs: Any, **_: Any) -> Any:
    """Return outputs that a model has computed already, whatever it is called with."""
    return outputs


def make_trainer() -> type:
    """Return TRL's RewardTrainer over isobit's OrderedTrainer."""
    stock = stock_trainer("RewardTrainer")
    from isobit.integrations.transformers.trainer import OrderedTrainer
    from isobit.parallel.data.global_batch import GlobalBatch

    class RewardTrainer(OrderedTrainer, stock):  # type: ignore[misc,valid-type]
        """TRL's RewardTrainer, with one result for every number of micro-batches and ranks.

        The model must be one for sequence classification with one label, and enabled before. A global batch has
        per_device_train_batch_size × gradient_accumulation_steps × ranks pairs.

        Args:
            *given: As for trl.RewardTrainer.
            **named: As for trl.RewardTrainer.

        Raises:
            UnsupportedError: If the model is not enabled, or an option is set that changes how gradients are summed.
        """

        def __init__(self, *given: Any, **named: Any) -> None:
            """Create TRL's trainer, and check model and options."""
            refuse_liger(named.get("args", given[1] if len(given) > 1 else None))
            refuse_later_adapters(named.get("peft_config"))
            super().__init__(*given, **named)
            self.model_accepts_loss_kwargs = True  # the loss is divided here, not by the Trainer

        @property
        def samples_of_a_step(self) -> GlobalBatch:
            """How the texts of a step are divided: two for each pair."""
            pairs = self.global_batch
            return GlobalBatch(
                total=2 * pairs.total, ranks=pairs.ranks, micro_batches=pairs.micro_batches
            )

        def training_step(
            self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
        ) -> Tensor:
            """Run forward and backward of one micro-batch."""
            return super().training_step(model, as_pairs(inputs), self.global_batch.total)

        def compute_loss(
            self,
            model: Any,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            """Return the mean over pairs, and record TRL's metrics."""
            if num_items_in_batch is None:  # evaluation
                inputs = as_pairs(inputs)
            margin = inputs.get("margin")
            texts = {name: value for name, value in inputs.items() if name != "margin"}
            outputs = model(**texts, use_cache=False)
            chosen, rejected = outputs.logits.reshape(-1, 2).unbind(-1)
            terms = pair_terms(chosen, rejected, margin)
            pairs = len(terms) if num_items_in_batch is None else num_items_in_batch
            loss = exact_sum(terms) / divisor(pairs, terms)
            args: Any = self.args
            if args.center_rewards_coefficient is not None:
                squares = (chosen.float() + rejected.float()).square()
                mean = exact_sum(squares) / divisor(pairs, squares)
                loss = loss + args.center_rewards_coefficient * mean
            outputs.logits = torch.cat((chosen, rejected)).unsqueeze(-1)
            # TRL's metrics, of the rewards in its order; its loss is not used.
            known: Any = partial(known_outputs, outputs)
            with torch.no_grad():
                super(OrderedTrainer, self).compute_loss(known, inputs)
            return (loss, outputs) if return_outputs else loss

    RewardTrainer.__module__, RewardTrainer.__qualname__ = __name__, "RewardTrainer"
    return RewardTrainer


def __getattr__(name: str) -> Any:
    """Return `RewardTrainer`. TRL and transformers are imported here and not before."""
    if name != "RewardTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["RewardTrainer"] = make_trainer()
    return made
