"""The subject of audit-v1: an audit of one model on one axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from isobit.auditing.api import audit
from isobit.auditing.records import Audit
from isobit.library.audit.plants import PLANTS
from isobit.library.audit.plants.plant import Inputs, Plant


@dataclass(frozen=True)
class Question:
    """What an audit is asked: of which model, on which axis, for which sample.

    Attributes:
        model: builds the model.
        inputs: draws its inputs; samples are along axis 0.
        axis: the axis.
        sample: the sample that is compared.
        backward: whether gradients are audited.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    axis: str
    sample: int = 0
    backward: bool = False

    @property
    def samples(self) -> int:
        """The number of samples."""
        return len(next(iter(self.inputs().values())))


def of_plant(plant: Plant) -> Question:
    """Return the question whose answer is the plant."""
    return Question(
        lambda: plant.make(True), plant.inputs, plant.axis, plant.sample, plant.backward
    )


def audited(x: Tensor, question: Question | None = None) -> Audit:
    """Audit a model; its hidden states are `x` where they have that shape.

    Args:
        x: Hidden states [samples, tokens, width].
        question: What is asked; by default about the first plant.
    """
    question = question or of_plant(PLANTS[0])
    inputs = question.inputs()
    if "x" in inputs and inputs["x"].shape == x.shape:
        inputs["x"] = x.to(inputs["x"].dtype)
    return audit(
        question.model(),
        inputs,
        vary=(question.axis,),
        sample=question.sample,
        backward=question.backward,
    )
