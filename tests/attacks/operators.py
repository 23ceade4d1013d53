"""Every public operator with a small input, for tests of what must be true of all of them.

The operators are found through the stub `isobit/__init__.pyi`, their arguments through each folder's reference.py.
"""

from importlib import import_module

import torch

import isobit
from isobit import bits
from isobit.ops import attesting, dispatch
from isobit.order.samples import Samples

ROWS, FEATURES = 6, 48
# name -> the module that defines it
OPERATORS = {
    name: home
    for name, home in isobit.HOMES.items()
    if home.startswith("isobit.ops.") and name.islower()
}


def draw(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, the same in every setting."""
    return attesting.draw(*shape, dtype=dtype, seed=seed)


def public(name):
    return getattr(isobit, name)


def reference(name):
    return getattr(import_module(f"{OPERATORS[name].rpartition('.')[0]}.reference"), name)


def example(name):
    """x [ROWS, FEATURES] -> the keyword arguments of one call."""
    home = import_module(f"{OPERATORS[name].rpartition('.')[0]}.reference")
    return getattr(home, f"example_{name}")


def last(result):
    """The tensor that is judged of an operator that returns several."""
    return result[-1] if isinstance(result, tuple) else result


def calls(dtype=torch.float32):
    """name -> function of one tensor [ROWS, FEATURES]; other inputs are constants, and no stock arithmetic is used."""
    rows, samples = draw(ROWS, FEATURES, dtype=dtype), Samples.packed([2, 4])

    def call(name):
        return lambda x: last(public(name)(**example(name)(x)))

    known = {name: call(name) for name in OPERATORS}
    known["a parameter's gradient"] = lambda w: isobit.linear(rows, w, samples=samples)
    return known


NAMES = list(calls())


def digests(dtype, given=None):
    """name -> digests of the output and of the gradient of the one tensor, in whichever executor serves."""
    found = {}
    for name, call in calls(dtype).items():
        x = draw(ROWS, FEATURES, dtype=dtype, seed=5) if given is None else given.clone()
        x.requires_grad_()
        y = call(x)
        y.backward(draw(*y.shape, dtype=y.dtype, seed=6))
        found[name] = bits.digest(y.detach()), bits.digest(x.grad)
    return found


def force_portable(monkeypatch):
    """Every later call goes to the portable executor."""
    monkeypatch.setattr(dispatch, "is_native", lambda _: False)
    monkeypatch.setattr(dispatch, "has_native", lambda: False)
