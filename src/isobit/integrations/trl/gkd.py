"""TRL's GKDTrainer over enabled models: its loss by isobit.distillation_loss, which cannot be negative.

[Note: TRL's definition] `generalized_jsd_loss` of TRL 1.16 takes beta = 0 as KL(teacher, student), beta = 1 as
KL(student, teacher), and what is between as the divergence of Jensen and Shannon with beta as the teacher's weight. It
has no factor T², and compute_loss does not pass the trainer's temperature, which only sampling uses. The loss here is
the same number, without its cancellation, and divided by the number of targets of the global batch where the trainer
counts them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.distilling import distil, teacher_states
from isobit.integrations.transformers.state import require_state
from isobit.integrations.trl.refusals import refuse_later_adapters, refuse_liger, stock_trainer

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
    model: Any
    teacher_model: Any

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
            count = max(float((targets != IGNORED).sum()), 1.0)
        direction = {0.0: "forward", 1.0: "reverse"}.get(float(self.beta), "jsd")
        return distil(
            self.accelerator.unwrap_model(model),
            teacher_states(teacher, ids, mask, None),
            ids,
            mask,
            targets=targets,
            alpha=1.0,
            direction=direction,
            beta=self.beta if direction == "jsd" else 0.5,
            num_items=count,
        )


if TYPE_CHECKING:
    GKDTrainer = Any


def __getattr__(name: str) -> Any:
    """Return `GKDTrainer`: TRL's with `OrderedGKD` mixed in. TRL is imported here and not before."""
    if name != "GKDTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = stock_trainer("GKDTrainer", "trl.experimental.gkd")
    made = type(
        "GKDTrainer", (OrderedGKD, stock), {"__doc__": OrderedGKD.__doc__, "__module__": __name__}
    )
    globals()["GKDTrainer"] = made
    return made
