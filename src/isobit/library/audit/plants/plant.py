"""What a plant is: an operator with a known fault, the model that it is in, and what an audit must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.records import ORDER
from isobit.ops.linear.op import linear
from isobit.ops.silu.op import silu

SAMPLES, TOKENS, WIDTH = 6, 7, 32
Inputs = dict[str, Tensor]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Plant:
    """A model with one operator that depends on an axis.

    Attributes:
        name: what is wrong, in a word or two.
        make: builds the model; with False, its twin with a right operator in the same place.
        inputs: draws the inputs; samples are along axis 0.
        operator: the operator to be named.
        module: the module to be named.
        axis: the axis that it depends on.
        kind: "order", "error" or "random".
        backward: whether it is the gradient that is at fault.
        sample: a sample whose result differs.
    """

    name: str
    make: Callable[[bool], nn.Module]
    inputs: Callable[[], Inputs]
    operator: str
    module: str
    axis: str = "batch"
    kind: str = ORDER
    backward: bool = False
    sample: int = 0

    def build(self) -> tuple[nn.Module, Inputs]:
        """Return the model with its fault, and its inputs."""
        return self.make(True), self.inputs()

    def build_twin(self) -> tuple[nn.Module, Inputs]:
        """Return the model without its fault, and the same inputs."""
        return self.make(False), self.inputs()


def draw(*shape: int, seed: int = 0, spread: int = 6) -> Tensor:
    """Return normal values times powers of two: sums cancel, and every order of addition shows."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    powers = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.ldexp(values, powers)


def hidden(samples: int = SAMPLES, tokens: int = TOKENS, width: int = WIDTH) -> Inputs:
    """Return hidden states [samples, tokens, width]."""
    return {"x": draw(samples, tokens, width, seed=1)}


def mild_hidden() -> Inputs:
    """Return hidden states of one magnitude: no term hides the others."""
    return {"x": draw(SAMPLES, TOKENS, WIDTH, seed=1, spread=0)}


def padded_hidden() -> Inputs:
    """Return hidden states and a mask: every second sample has two tokens fewer, and junk in their place."""
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    mask[::2, -2:] = 0
    return {**hidden(), "attention_mask": mask}


class Dense(nn.Module):
    """A linear layer of isobit with a SiLU: clean."""

    def __init__(self, width: int = WIDTH, out: int = WIDTH, seed: int = 10) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(out, width, seed=seed, spread=1) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return silu(linear(x, self.weight))


class Layer(nn.Module):
    """A module that calls one function with x, its weight if it has one, and the mask if it asks for it."""

    def __init__(
        self, call: Function, weight: tuple[int, ...] = (), masked: bool = False, spread: int = 3
    ) -> None:
        super().__init__()
        self.call, self.masked = call, masked
        self.weight = nn.Parameter(draw(*weight, seed=20, spread=spread)) if weight else None

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        weight = () if self.weight is None else (self.weight,)
        mask = (attention_mask,) if self.masked else ()
        y: Tensor = self.call(x, *weight, *mask)
        return y


class Net(nn.Module):
    """Clean layers around a planted one: `layers.1`."""

    def __init__(self, planted: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(), planted, last or nn.Identity()])
        self.eval()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        first, planted, last = self.layers
        x = first(x)
        x = planted(x, attention_mask) if isinstance(planted, Layer) else planted(x)
        y: Tensor = last(x)
        return y


def operator(name: str, fake: Function | None = None) -> Callable[[Function], Function]:
    """Decorate a function as the operator `planted::<name>`: the dispatcher sees one call.

    Args:
        name: The operator's name.
        fake: Returns empty outputs; by default one in the shape of the first argument.
    """

    def register(function: Function) -> Function:
        made = torch.library.custom_op(f"planted::{name}", function, mutates_args=())
        made.register_fake(fake or (lambda x, *_: torch.empty_like(x)))
        return made

    return register


def rows_by_outputs(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Return the empty product of x [..., K] and weight [N, K]."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def planted_in_net(
    name: str,
    wrong: Function,
    right: Function,
    *,
    operator: str = "",
    weight: tuple[int, ...] = (),
    inputs: Callable[[], Inputs] = hidden,
    axis: str = "batch",
    kind: str = ORDER,
    masked: bool = False,
    sample: int = 0,
    last: Callable[[], nn.Module] | None = None,
) -> Plant:
    """Return the plant of one operator in `layers.1` of a `Net`."""

    def make(faulty: bool) -> nn.Module:
        call = wrong if faulty else right
        return Net(Layer(call, weight, masked), last() if last else None)

    named = operator or f"planted::{name}"
    return Plant(name, make, inputs, named, "layers.1", axis, kind, sample=sample)
