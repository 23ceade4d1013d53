"""What a check of a derived checkpoint found, as plain records."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

STATED, LEFT, WRONG = "as stated", "left as it was", "WRONG"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TensorVerdict:
    """The verdict on one tensor.

    Attributes:
        name: its name in the derived checkpoint.
        verdict: "as stated", "left as it was" or "WRONG".
        elements: how many it has.
        wrong: how many of them contradict the statement.
        cause: what is wrong, "" if nothing is.
        figures: what was measured, by name.
    """

    name: str
    verdict: str
    elements: int
    wrong: int = 0
    cause: str = ""
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Derivation:
    """A derived checkpoint, checked against what it is said to be.

    Attributes:
        path: of the checkpoint.
        statement: what was checked, in words.
        tensors: one verdict per tensor.
        notes: what was decided.
    """

    path: str
    statement: str
    tensors: tuple[TensorVerdict, ...]
    notes: tuple[str, ...] = ()

    def of(self, verdict: str) -> tuple[TensorVerdict, ...]:
        """Return the tensors with a verdict."""
        return tuple(one for one in self.tensors if one.verdict == verdict)

    @property
    def wrong(self) -> tuple[TensorVerdict, ...]:
        """The tensors that contradict the statement."""
        return self.of(WRONG)

    @property
    def vacuous(self) -> bool:
        """Whether the statement applied to no tensor at all."""
        return not (self.of(STATED) or self.wrong)

    @property
    def exit_code(self) -> int:
        """0 if every tensor is as stated, 1 if one is wrong or the statement applies to none."""
        return 1 if self.wrong or self.vacuous else 0


# Weights that tools for pruning and quantisation leave alone unless they are told to take them.
NOT_LINEAR = re.compile(r"embed|wte|wpe|lm_head|norm|rotary|router|rotary_emb|ln_\d|ln_f")


def is_linear_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a linear layer, by its name and shape."""
    return len(shape) >= 2 and not name.endswith("bias") and not NOT_LINEAR.search(name)
