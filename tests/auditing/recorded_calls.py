"""Calls of operators, recorded or made by hand, and their orders."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.orders.order_pictures import reveal_both
from isobit.auditing.replay.call import Call

NAMES = ("batch of 8", "alone")
DTYPES = (torch.float32, torch.bfloat16)


class Recorder(TorchDispatchMode):
    """Record the calls of one operator."""

    def __init__(self, name):
        super().__init__()
        self.name, self.calls = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.name:
            self.calls.append(Call(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def record(name, function, *inputs):
    """Return the one call of an operator inside a function."""
    with torch.no_grad(), Recorder(name) as recorder:
        function(*inputs)
    (call,) = recorder.calls
    return call


def both(func, run, variant, **options):
    return reveal_both(Call(func, run, {}), Call(func, variant, {}), NAMES, **options)


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)  # values must not matter


def trees(certificate):
    return {name: c.tree for c in certificate.classes for name in c.configurations}
