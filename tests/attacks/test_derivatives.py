"""Derivatives that have no order are refused by name: forward mode, second order, and torch.func's transforms."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

import isobit
from tests.attacks.operators import FEATURES, NAMES, ROWS, calls, draw, force_portable

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

X, T = draw(ROWS, FEATURES), draw(ROWS, FEATURES, seed=9)
SERVING = {
    "linear_cross_entropy": "(linear_logprob|exact_sum)",
    "distillation_loss": "(distillation_loss|exact_sum)",
    "a parameter's gradient": "linear",
}


def test_every_public_operator_is_attacked():
    """A new operator is added to operators.calls(); the files on first calls, subnormals and NaN then try it too."""
    public = {
        name
        for name, home in isobit.HOMES.items()
        if home.startswith("isobit.ops.") and name.islower()
    }
    assert public <= set(NAMES)
    assert len(public) > 12


def total(call):
    return lambda x: call(x).double().square().sum()


def dual(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(X, T))


def dual_while_gradients_are_taken(call):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(X.clone().requires_grad_(), T))


def dual_in_backward(call):
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        y = call(x)
        y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


FORWARD = {
    "jvp": lambda call: jvp(call, (X,), (T,)),
    "jvp of jvp": lambda call: jvp(lambda x: jvp(call, (x,), (T,))[1], (X,), (T,)),
    "jvp of another jvp": lambda call: jvp(
        lambda x: jvp(lambda z: z * call(x).sum(), (X,), (T,))[1], (X,), (T,)
    ),
    "jvp of grad": lambda call: jvp(grad(total(call)), (X,), (T,)),
    "grad of jvp": lambda call: grad(lambda x: jvp(call, (x,), (T,))[1].sum())(X),
    "jacfwd": lambda call: jacfwd(call)(X),
    "dual tensors": dual,
    "dual tensors that need gradients": dual_while_gradients_are_taken,
    "a dual gradient in backward": dual_in_backward,
}


@pytest.mark.parametrize("executor", ["native or portable", "portable"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sweep(16)
def test_a_tangent_is_refused_by_name(name, executor, monkeypatch):
    if executor == "portable":
        force_portable(monkeypatch)
    call = calls()[name]
    for way, derive in FORWARD.items():
        with pytest.raises(
            isobit.UnsupportedError, match=f"isobit.{SERVING.get(name, name)}"
        ) as refused:
            derive(call)
        assert "forward-mode" in str(refused.value) or way == "jvp of grad", way
        assert "torch.autograd.grad" in refused.value.remedy


@pytest.mark.parametrize("name", NAMES)
def test_the_remedy_gives_the_directional_derivative(name):
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(total(calls()[name])(x), x)
    ahead, behind = (
        total(calls()[name])(X.double().add(T.double(), alpha=a).float()) for a in (1e-3, -1e-3)
    )
    assert torch.allclose((found * T).sum().double(), (ahead - behind) / 2e-3, rtol=3e-2, atol=3e-2)


def test_constants_may_pass_while_forward_mode_is_in_use():
    _, tangent = jvp(lambda x: x * isobit.silu(T), (X,), (T,))
    assert torch.equal(tangent, T * isobit.silu(T))


@pytest.mark.parametrize("executor", ["native or portable", "portable"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_order_is_refused_by_name(name, executor, monkeypatch):
    if executor == "portable":
        force_portable(monkeypatch)
    x = X.clone().requires_grad_()

    def second_order():
        (first,) = torch.autograd.grad(total(calls()[name])(x), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)

    with pytest.raises(isobit.UnsupportedError, match="gradient of isobit"):
        second_order()


@pytest.mark.parametrize("name", NAMES)
def test_transforms_of_torch_func_are_refused_by_name(name):
    call = calls()[name]
    with pytest.raises(isobit.UnsupportedError, match="vmap over isobit"):
        vmap(call)(torch.stack([X, X]))
    with pytest.raises(isobit.UnsupportedError, match=r"torch.func|gradient of isobit"):
        grad(lambda x: grad(total(call))(x).sum())(X)
    with pytest.raises(isobit.UnsupportedError, match=r"torch\.func") as refused:
        grad(total(call))(X)
    assert "torch.autograd.grad" in refused.value.remedy
