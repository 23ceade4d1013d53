"""TRL's GKDTrainer over enabled models: its loss by isobit.distillation_loss, which cannot be negative.

[Note: TRL's definition] `generalized_jsd_loss` of TRL 1.16 takes beta = 0 as KL(teacher, student), beta = 1 as
KL(student, teacher), and what is between as the divergence of Jensen and Shannon with beta as the teacher's weight. It
has no factor T², and compute_loss does not pass the trainer's temperature, which only sampling uses. The loss here is
the same number, without its cancellation, and divided by the number of targets of the global batch where the trainer
counts them. As in TRL, those are the targets of the dataset's answers, also where the student's own texts are used.

[Note: one result for every division] Micro-batches run inside `isobit.parallel.Gradients`, as in OrderedTrainer. TRL
decides for each micro-batch whether a model writes its texts, and draws their tokens from one generator; here the
decision belongs to a step, and draws to (seed, sample of the run, position). The logged loss is the exact sum over the
step's tokens, divided once: the last micro-batch returns it to the Trainer, and the others return 0.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.distilling import distil, teacher_states
from isobit.integrations.transformers.sampling import KeyedSampling
from isobit.integrations.transformers.state import require_state
from isobit.integrations.trl.grpo import replaced_generate
from isobit.integrations.trl.refusals import refuse_later_adapters, refuse_liger, stock_trainer
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.loss import divisor, refuse_mean_of_share
from isobit.parallel.data.loss_meter import LossMeter

IGNORED = -100


class OrderedGKD:
    """Mix in before a GKDTrainer of TRL: `class Mine(OrderedGKD, GKDTrainer)`. See [Note: TRL's definition].

    Student and teacher must be enabled (`isobit.enable`) before the trainer is created.

    Raises:
        UnsupportedError: For Liger's loss, for outputs of the student, or where a model is not enabled.
    """

    # names of TRL's trainer
    accelerator: Any
    args: Any
    beta: float
    lmbda: float
    model: Any
    teacher_model: Any

    token_losses: Tensor  # of the last batch

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create TRL's trainer, and check what it was asked for."""
        refuse_liger(named.get("args", given[2] if len(given) > 2 else None))
        refuse_later_adapters(named.get("peft_config"))
        super().__init__(*given, **named)
        for model in (self.model, self.teacher_model):
            require_state(self.accelerator.unwrap_model(model))

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the divergence over the targets of a batch."""
        if return_outputs:
            raise UnsupportedError(
                expected="the loss alone",
                received="return_outputs=True: logits of the student, which are never kept",
                remedy="set prediction_loss_only=True to evaluate",
            )
        ids, mask, labels = (inputs[name] for name in ("input_ids", "attention_mask", "labels"))
        targets = torch.full_like(labels, IGNORED)
        targets[:, :-1] = labels[:, 1:]
        teacher = self.accelerator.unwrap_model(self.teacher_model).eval()
        count = None if num_items_in_batch is None else float(num_items_in_batch)
        if count is None:
            refuse_mean_of_share()
            count = max(float((targets != IGNORED).sum()), 1.0)
        direction = {0.0: "forward", 1.0: "reverse"}.get(float(self.beta), "jsd")
        each = distil(
            self.accelerator.unwrap_model(model),
            teacher_states(teacher, ids, mask, None),
            ids,
            mask,
            targets=targets,
            alpha=1.0,
            direction=direction,
            beta=self.beta if direction == "jsd" else 0.5,
            reduction="none",
        )
        self.token_losses = each.detach()
        return exact_sum(each) / divisor(count, each)


if TYPE_CHECKING:
    GKDTrainer = Any


def make_trainer() -> type:
    """Return TRL's GKDTrainer with OrderedGKD's loss, over isobit's OrderedTrainer."""
    stock: Any = stock_trainer("GKDTrainer", "trl.experimental.gkd")
    from isobit.integrations.transformers.trainer import OrderedTrainer

    class GKDTrainer(OrderedGKD, OrderedTrainer, stock):  # type: ignore[misc]
        """TRL's GKDTrainer, with one result for every number of micro-batches and ranks.

        Student and teacher must be enabled before. A global batch has per_device_train_batch_size ×
        gradient_accumulation_steps × ranks samples. See [Note: one result for every division].

        Args:
            *given: As for trl.experimental.gkd.GKDTrainer.
            **named: As for trl.experimental.gkd.GKDTrainer.

        Raises:
            UnsupportedError: If a model is not enabled, or an option is set that changes how gradients are summed.
        """

        def __init__(self, *given: Any, **named: Any) -> None:
            """Create TRL's trainer, and check models and options."""
            super().__init__(*given, **named)
            self.model_accepts_loss_kwargs = True  # the loss is divided here, not by the Trainer
            self._requests = range(0)
            self._meter = LossMeter()

        def training_step(
            self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
        ) -> Tensor:
            """Run forward and backward of one micro-batch, of the dataset's texts or a model's own."""
            step, batch, micro = self.state.global_step, self.global_batch, self._micro
            held = batch.samples(self.args.process_index, micro)
            first = step * batch.total + held.start
            self._requests = range(first, first + len(held))
            asked: float = self.lmbda
            drawn = random.Random(f"{self.args.seed} {step}").random()
            self.lmbda = 2.0 if drawn < asked else -1.0  # TRL draws from [0, 1) and compares
            try:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            finally:
                self.lmbda = asked
            if micro == 0:
                self._meter.reset()
            # Of all shares, the first brings the divisor.
            self._meter.add(self.token_losses, 0 if held.start else int(num_items_in_batch))
            if micro + 1 < batch.micro_batches:
                return torch.zeros_like(loss)
            return self._meter.value(dtype=torch.float32).to(loss.device)

        def generate_on_policy_outputs(
            self, model: Any, inputs: dict[str, Any], generation_config: Any
        ) -> Any:
            """Return what TRL makes of texts that a model writes, with draws that do not depend on the batch."""
            with replaced_generate(model, self._generate_keyed):
                return stock.generate_on_policy_outputs(model, inputs, generation_config)

        def _generate_keyed(self, generate: Any, generation_config: Any, **inputs: Any) -> Any:
            mask = inputs["attention_mask"]
            seed, temperature = self.args.seed, self.args.temperature
            draws = KeyedSampling(seed, temperature, samples=self._requests, attention_mask=mask)
            greedy = copy.deepcopy(generation_config)
            greedy.update(do_sample=False, temperature=None, top_k=None, top_p=None)
            return generate(**inputs, generation_config=greedy, logits_processor=[draws])

    GKDTrainer.__module__, GKDTrainer.__qualname__ = __name__, "GKDTrainer"
    return GKDTrainer


def __getattr__(name: str) -> Any:
    """Return `GKDTrainer`. TRL and transformers are imported here and not before."""
    if name != "GKDTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["GKDTrainer"] = make_trainer()
    return made
