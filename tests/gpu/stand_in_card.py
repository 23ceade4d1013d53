"""A stand-in for a GPU: tensors that say `cuda`, hold their elements on the CPU, and refuse what a card would refuse.

Torch without CUDA cannot differentiate fake tensors on `cuda`, so this is a wrapper around CPU tensors instead.
To C++ a `Card` is a CPU tensor; Python code sees its device and `is_cuda`. An operator that mixes cards and CPU tensors
raises, as torch does. A Triton operator is computed by the CPU's executor, which has the same bits in fp32: what is
tested is everything around the kernels. What is read on the host is counted.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from isobit.integrations.transformers import refusals
from isobit.ops import device_tables, dispatch
from isobit.ops.linear.op import linear_fp32

CARD = torch.device("cuda", 0)
# Indices may be on the CPU, and a copy crosses devices.
CROSSING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::copy_", "aten::_to_copy")
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero")
host_reads = Counter()
operators = Counter()


class Card(Tensor):
    """A tensor on the stand-in."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CARD)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device="cpu"
        )

    def __init__(self, held):
        self.held = held

    def __repr__(self, **_):
        return f"Card({self.held})"

    def tolist(self):
        host_reads["tolist"] += 1
        return self.held.tolist()

    def cpu(self, **_):
        host_reads["to cpu"] += 1
        return self.held.detach().clone()

    def data_ptr(self):
        return self.held.data_ptr()  # an address, which a card has too

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def get_device(self):
        return 0

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        operators[name] += 1
        if name in READS:
            host_reads[name] += 1
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name.startswith("isobit::triton_"):  # spans may be on the host, where they are read
            given = [t for t in given if t.dtype != torch.int64]
        if name not in CROSSING and any(not isinstance(t, Card) and t.dim() for t in given):
            devices = [f"{list(t.shape)} on {t.device}" for t in given]
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device: {devices}")
        if name.startswith("isobit::") and not name.startswith("isobit::triton_"):
            raise NotImplementedError(f"{name} has no kernel for cuda")
        inner_args, inner = tree_map_only(Card, lambda t: t.held, (args, kwargs))
        if name.startswith("isobit::"):  # dispatch leaves out what equals its default
            rest = func._schema.arguments[len(args) :]
            inner_args = (*inner_args, *(one.default_value for one in rest))
        found = executor_on_cpu(func)(*inner_args, **inner)
        if name == "aten::copy_" and not isinstance(args[0], Card):
            host_reads[name] += 1
            return args[0]
        wrapped = tree_map_only(Tensor, Card, found)
        if name.startswith("isobit::"):
            return wrapped
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def executor_on_cpu(func):
    """Return the native operator in place of a Triton one, or the portable one where there is no other."""
    name = func._schema.name.removeprefix("isobit::triton_")
    if name == func._schema.name:
        return func
    if name == "linear_fp32":
        return linear_fp32
    if name == "exact_state":
        return lambda tensor, squared: torch.ops.isobit.exact_state([tensor], squared)
    ours = torch.ops.isobit
    if name in ("linear_logprob", "linear_logprob_backward"):  # the native ones take no soft cap
        portable, native = getattr(ours, f"portable_{name}"), getattr(ours, name)
        return lambda *given: portable(*given) if given[-1] else native(*given[:-1])
    if name == "scaled_":
        return lambda x, factor: ours.scale_([x], factor)
    if name == "adamw_":
        return lambda p, grad, first, second, *numbers: ours.adamw_(
            [p], [grad], [first], [second], numbers[:-1], numbers[-1]
        )
    return getattr(ours, name) if hasattr(ours, name) else getattr(ours, f"portable_{name}")


class OnCard(TorchFunctionMode):
    """Make tensors that are asked for on `cuda`, and move them there and back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cpu", "to", "cuda", "type_as") and args and isinstance(args[0], Tensor):
            return self.move(name, func, args, kwargs)
        if func is Tensor.backward:  # inside of it this mode would be closed
            gradient = kwargs.get("gradient")
            gradient = torch.ones_like(args[0]) if gradient is None else gradient
            run = torch.autograd.Variable._execution_engine.run_backward
            with self:
                return run((args[0],), (gradient,), False, False, (), True, accumulate_grad=True)
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = "cpu"
            found = func(*args, **kwargs)
            return found if isinstance(found, Card) else Card(found)
        return func(*args, **kwargs)

    def move(self, name, func, args, kwargs):
        tensor, rest = args[0], [a for a in args[1:] if isinstance(a, torch.dtype)]
        asked = [*args[1:], kwargs.pop("device", None)]
        places = [torch.device(a) for a in asked if isinstance(a, (str, torch.device))]
        places += [a.device for a in asked if isinstance(a, Tensor)]
        if name in ("cpu", "cuda"):
            places, func, rest = [torch.device(name)], Tensor.to, []
        kwargs.pop("non_blocking", None)
        place = places[0] if places else tensor.device
        if isinstance(tensor, Card) and place.type == "cpu":
            host_reads["to cpu"] += 1
            return Tensor.to(tensor.held.detach(), "cpu", *rest, **kwargs)
        moved = tensor if not rest and not kwargs else func(tensor, *rest, **kwargs)
        return (
            Card(moved.clone()) if place.type == "cuda" and not isinstance(moved, Card) else moved
        )


def to_card(model):
    """Move a model, as `model.to("cuda")` would: parameters that are shared stay shared."""
    moved = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(Card(parameter.detach().clone()))
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = Card(buffer.clone())
    return model


@contextmanager
def on_card():
    """Open the stand-in, with empty counters."""
    dispatch.has_native()
    host_reads.clear()
    operators.clear()
    overwrite = torch.__future__.set_overwrite_module_params_on_conversion
    overwrite(True)  # to C++ both are CPU tensors, so Module.to would keep the old ones
    # Tables of one stand-in are none of another, whose class may be another one of the same name.
    tables = mock.patch.dict(device_tables._made, clear=True)
    # enable refuses subclasses of tensors, whose operators are their own.
    try:
        with tables, mock.patch.object(refusals, "check_parameters"), OnCard():
            yield
    finally:
        overwrite(False)
