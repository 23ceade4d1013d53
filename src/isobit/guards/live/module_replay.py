"""Run the forward of a micro-batch again, to name the module where numbers stop being finite or the graph ends.

[Note: replay instead of tracing]
A hook on every module of every step would cost more than the checks that it serves. So a watch keeps only the arguments
of the last call of the model and the state of the random number generators before it. When a loss or a gradient is not
finite, and before the optimizer changes the weights, the forward is run again with hooks on all modules. Buffers and
generators are put back afterwards. Arguments that the program changed in place in the meantime are not as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from isobit.guards.live.comparison import is_finite


@dataclass(frozen=True)
class ModelCall:
    """The arguments of one call of a model, and what else its result depends on."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: dict[str, Tensor]
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall:
        """Record a call that is about to be made."""
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators["cuda"] = torch.cuda.get_rng_state()
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        return cls(args, kwargs, generators, autocast)


@dataclass
class CallOrder:
    """What was seen of each call of a module, in the order in which the calls end."""

    calls: list[tuple[str, bool, bool]] = field(default_factory=list)  # name, inputs, outputs
    origin: str = ""
    stack: list[str] = field(default_factory=list)


class Found(Exception):
    """Ends a replay early."""


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, dictionaries and model outputs."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, depth - 1)


def all_finite(value: Any) -> bool:
    """Return whether every tensor in a value is finite."""
    return all(is_finite(t.detach()) for t in tensors_in(value) if t.layout == torch.strided)


def needs_gradient(value: Any) -> bool:
    """Return whether a tensor in a value is part of a graph."""
    return any(tensor.requires_grad for tensor in tensors_in(value))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel, whose forward calls other ranks."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, wrappers):
        model = model.module
    return model


class Buffers:
    """The buffers of a model, as they are now; a forward may write to them, or replace them.

    Versions are put back with the numbers: the program's own backward, which may follow, checks them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        counted = tuple(b for _, _, b, _ in self.kept if not b.is_inference())
        self.versions = _unsafe_preserve_version_counter(counted) if counted else None

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the model's buffers the same tensors with the same numbers again."""
        for module, name, buffer, before in self.kept:
            buffer.copy_(before)
            module._buffers[name] = buffer
        if self.versions is not None:
            self.versions.__exit__()


@contextmanager
def as_it_was(model: nn.Module, call: ModelCall, *, keeps_buffers: bool = False) -> Iterator[None]:
    """Set generators and autocast as at the call; put generators and buffers back at the end.

    Args:
        model: The model that is called.
        call: The call.
        keeps_buffers: Leave the buffers as the call leaves them.
    """
    buffers = None if keeps_buffers else Buffers(model)
    now = ModelCall.of((), {})
    with ExitStack() as stack:
        for kind, dtype in call.autocast:
            stack.enter_context(torch.autocast(kind, dtype))
        set_generators(call)
        try:
            yield
        finally:
            set_generators(now)
            if buffers is not None:
                buffers.put_back()


def set_generators(call: ModelCall) -> None:
    """Set the state of torch's generators."""
    torch.set_rng_state(call.generators["cpu"])
    if "cuda" in call.generators:
        torch.cuda.set_rng_state(call.generators["cuda"])


def find_nonfinite(model: nn.Module, call: ModelCall) -> tuple[str, str]:
    """Return the module whose inputs are finite and whose output is not, and a sentence; empty if there is none.

    Args:
        model: The model that was called.
        call: Its last call.
    """
    model, seen = unwrapped(model), CallOrder()
    if not all_finite((call.args, call.kwargs)):
        return "", "the input of the model is not finite"

    def before(name: str, given: Any) -> None:
        if not all_finite(given):
            seen.origin = seen.stack[-1] if seen.stack else ""
            raise Found(f"its own code, before it calls {name}")
        seen.stack.append(name)

    def after(name: str, module: nn.Module, output: Any) -> None:
        seen.stack.pop()
        if not all_finite(output):
            seen.origin = name
            weights = [n for n, p in module.named_parameters(recurse=False) if not all_finite(p)]
            raise Found(f"its {weights[0]} is not finite" if weights else "its input is finite")

    try:
        with torch.no_grad(), as_it_was(model, call):
            hooked_call(model, call, before, after)
    except Found as found:
        name = seen.origin
        what = f"{type(model.get_submodule(name)).__name__}, {found}" if name else str(found)
        return (
            name,
            f"the first output that is not finite is that of {name or 'the model'} ({what})",
        )
    return (
        "",
        "the forward is finite when it is run again: the loss function, or the backward, is not",
    )


def find_end_of_graph(model: nn.Module, call: ModelCall, without: list[str]) -> str:
    """Return in words where the graph ends for parameters that get no gradient, or nothing.

    Args:
        model: The model that was called.
        call: Its last call.
        without: Names of parameters without a gradient.
    """
    model, seen = unwrapped(model), CallOrder()

    def before(name: str, given: Any) -> None:
        floating = [t for t in tensors_in(given) if t.is_floating_point()]
        seen.calls.append((name, not floating or needs_gradient(floating), True))

    def after(name: str, module: nn.Module, output: Any) -> None:
        seen.calls.append((name, True, needs_gradient(output)))

    with torch.enable_grad(), as_it_was(model, call):
        hooked_call(model, call, before, after)
    owners = {name.rpartition(".")[0].removeprefix("module.") for name in without}
    used = [at for at, (name, _, _) in enumerate(seen.calls) if name in owners]
    if not used:
        return "their modules are not called"
    for name, inputs, outputs in seen.calls[used[-1] :]:
        if not outputs:
            return f"the graph ends in {name or 'the model'}"
        if not inputs:
            return f"the graph ends before {name or 'the model'} is called"
    return "their results are not used in what gets a gradient"


def find_cancelled(model: nn.Module, call: ModelCall, biases: list[str]) -> list[str]:
    """Return the biases whose gradient of zero is one of cancellation: their module's output does depend on them.

    The gradient of a bias is the sum of its output's gradients. A batch norm, the softmax over keys and a loss of
    differences make that sum zero. If instead the output of its own module has no derivative by the bias, the graph is
    cut there, or the bias is multiplied by zero.

    Args:
        model: The model that was called.
        call: Its last call.
        biases: Names of parameters whose gradient is zero, next to others of their module whose gradient is not.
    """
    model = unwrapped(model)
    owners = {name: name.removeprefix("module.").rpartition(".")[0] for name in biases}
    outputs: dict[str, list[Tensor]] = {}

    def after(name: str, module: nn.Module, output: Any) -> None:
        if name in owners.values():
            outputs.setdefault(name, []).extend(t for t in tensors_in(output) if t.requires_grad)

    with torch.enable_grad(), as_it_was(model, call):
        hooked_call(model, call, lambda name, given: None, after)
    depends = []
    for name, owner in owners.items():
        parameter = model.get_parameter(name.removeprefix("module."))
        found = outputs.get(owner, [])
        # Positive, so that they cannot cancel in a sum, and unequal, so that a softmax does not either.
        seeds = [1 + torch.linspace(0, 1, t.numel()).view_as(t).to(t) for t in found]
        given = (
            torch.autograd.grad(found, parameter, seeds, True, allow_unused=True)[0]
            if found
            else None
        )
        if given is not None and bool(given.count_nonzero()):
            depends.append(name)
    return depends


def hooked_call(model: nn.Module, call: ModelCall, before: Any, after: Any) -> None:
    """Call the model with hooks on every module; remove them in any case."""
    with ExitStack() as stack:
        for name, module in model.named_modules():

            def pre(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                before(name, (args, kwargs))

            def post(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                after(name, module, output)

            for handle in (
                module.register_forward_pre_hook(pre, with_kwargs=True),
                module.register_forward_hook(post),
            ):
                stack.callback(handle.remove)
        model(*call.args, **call.kwargs)
