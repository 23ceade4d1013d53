"""Planted gradients: the forward is right, the gradient of the input depends on an axis."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from isobit.auditing.records import ERROR, ORDER
from isobit.library.audit.plants import products
from isobit.library.audit.plants.plant import (
    WIDTH,
    Function,
    Net,
    Plant,
    draw,
    hidden,
    operator,
    rows_by_outputs,
)
from isobit.library.audit.plants.products import MANY, chained, rows_of

EXPERTS, OUTPUTS, CROWD = 3, 8, 4
_calls = itertools.count()


def grad_terms(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the products of grad [..., N] and weight [N, K] as [..., K, N], not yet added."""
    return products.terms_of(grad, weight.T.contiguous())


def input_shape(grad: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Return the empty gradient of x [..., K]."""
    return grad.new_empty((*grad.shape[:-1], weight.shape[-1]))


def product_with(name: str, input_grad: Function) -> Function:
    """Register the product `planted::<name>` with `planted::<name>_input_grad` as its gradient; the weight has none."""
    gradient = operator(f"{name}_input_grad", input_shape)(input_grad)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return chained(x, weight)

    made: Any = operator(name, rows_by_outputs)(forward)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient(grad.contiguous(), weight), None

    made.register_autograd(backward, setup_context=setup_context)
    return made  # type: ignore[no-any-return]


def right(grad: Tensor, weight: Tensor) -> Tensor:
    """Add in one order."""
    return products.chain(grad_terms(grad, weight))


def by_rows(grad: Tensor, weight: Tensor) -> Tensor:
    """Add by halves where rows are many."""
    terms = grad_terms(grad, weight)
    return products.pairwise(terms) if rows_of(grad) > MANY else products.chain(terms)


def by_chance(grad: Tensor, weight: Tensor) -> Tensor:
    """Add in the order in which terms happen to arrive."""
    return products.shuffled(grad_terms(grad, weight), next(_calls))


def averaged(grad: Tensor, weight: Tensor) -> Tensor:
    """Divide by the number of samples, as if the loss were their mean."""
    return right(grad, weight) / len(grad)


def last_dropped(grad: Tensor, weight: Tensor) -> Tensor:
    """Leave the last row of a batch at zero."""
    y = right(grad, weight)
    if len(y) > 1:
        y[-1, -1] = 0.0
    return y


right_product = product_with("right_product", right)
WRONG = {
    "grad_by_rows": (by_rows, "batch", ORDER, 0),
    "grad_by_chance": (by_chance, "repeat", ORDER, 0),
    "grad_averaged": (averaged, "batch", ERROR, 0),
    "grad_last_dropped": (last_dropped, "batch", ERROR, 5),
}


class Frozen(nn.Module):
    """A product whose weight is not trained."""

    def __init__(self, call: Function, *shape: int) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("weight", draw(*shape, seed=40, spread=3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.call(x, self.weight)
        return y


def plant_of(name: str) -> Plant:
    """Return the plant of one wrong gradient of a product."""
    wrong, axis, kind, sample = WRONG[name]
    product = product_with(name, wrong)

    def make(faulty: bool) -> nn.Module:
        return Net(Frozen(product if faulty else right_product, OUTPUTS, WIDTH))

    found = f"planted::{name}_input_grad"
    return Plant(name, make, hidden, found, "layers.1", axis, kind, backward=True, sample=sample)


# ---- one expert of several, as in a mixture of experts ---------------------------------------------------


def experts_shape(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Return the empty result of experts: weight is [E, N, K]."""
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def expert_of(x: Tensor) -> Tensor:
    """Return the expert of each token: by its largest of a few features."""
    return x[..., :EXPERTS].argmax(-1)


def by_experts(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each token by its expert's weight."""
    return products.chain(x[..., None, :] * weight[expert_of(x)])


def experts_grad(grad: Tensor, weight: Tensor, x: Tensor, halve: bool) -> Tensor:
    """Return the gradient of tokens, in half where expert 1 has many of them."""
    chosen = expert_of(x)
    y = products.chain(grad[..., None, :] * weight[chosen].transpose(-1, -2))
    crowded = halve and int((chosen == 1).sum()) > CROWD
    return torch.where((chosen == 1)[..., None], y * 0.5, y) if crowded else y


def experts_with(name: str, halve: bool) -> Function:
    """Register a layer of experts with a right or a wrong gradient."""

    @operator(f"{name}_input_grad", input_shape)
    def gradient(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return experts_grad(grad, weight, x, halve)

    @operator(name, experts_shape)
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return by_experts(x, weight)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[0])

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gradient(grad.contiguous(), *ctx.saved_tensors), None

    made: Any = forward
    made.register_autograd(backward, setup_context=setup_context)
    return forward


crowded_expert, right_experts = (
    experts_with("crowded_expert", halve=True),
    experts_with("right_experts", halve=False),
)


def with_experts(faulty: bool) -> nn.Module:
    """Return a model with a layer of experts."""
    call = crowded_expert if faulty else right_experts
    return Net(Frozen(call, EXPERTS, OUTPUTS, WIDTH))


PLANTS: tuple[Plant, ...] = (
    *(plant_of(name) for name in WRONG),
    Plant(
        "crowded_expert",
        with_experts,
        hidden,
        "planted::crowded_expert_input_grad",
        "layers.1",
        kind=ERROR,
        backward=True,
        sample=0,
    ),
)
