"""Compile the modules of a model one by one, and run a compiled module in the place of the eager one.

[Note: one compilation per kind of module] Layers of a model differ in their weights only. A module is compiled as a
copy of its structure, into which the weights of any module of the same kind are put: weights are inputs of compiled
code. Before that is used for another module, the copy is run eagerly and must give that module's own bits.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from isobit import bits
from isobit.auditing.replay.call import spec_of, tensors_of
from isobit.auditing.replay.watching import first_line

Settings = dict[str, Any]
# Beyond the usual limit of 8, dynamo would silently run code eagerly, and nothing would be compared.
SETTINGS: Settings = {
    "recompile_limit": 10_000,
    "accumulated_recompile_limit": 100_000,
    "fail_on_recompile_limit_hit": True,
}
PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype, torch.device)
NUMBERS = {"layer_idx", "layer_id", "layer_number"}  # attributes that only count layers


class NotCompiled(Exception):
    """A module that was not compiled, and why."""


class Compiler:
    """Compiled forms of a model's modules.

    Args:
        model: The model, without any hook of the audit.
        budget: Seconds after which no further kind of module is compiled.
        say: Called with what is compiled.
        backend: The backend of torch.compile.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: float,
        say: Callable[[str], None],
        backend: str = "inductor",
    ) -> None:
        """Copy the structure of the model; weights are shared."""
        self.model, self.budget, self.say = copy_structure(model), budget, say
        self.backend = backend
        self.spent = 0.0
        self.kinds: dict[object, tuple[nn.Module, Any]] = {}
        self.alike: dict[tuple[str, object], bool] = {}

    def run(self, path: str, args: Any, kwargs: Any, eager: Any) -> Any:
        """Run the compiled form of a module.

        Args:
            path: The path of the module.
            args: What it is called with.
            kwargs: What it is called with by name.
            eager: What the eager module returns.

        Raises:
            NotCompiled: It cannot be compiled, or not in time.
        """
        module = self.model.get_submodule(path) if path else self.model
        key = self.kind_of(path, module, args, kwargs, eager)
        known = self.kinds.get(key)
        if known is None:
            if self.spent > self.budget:
                raise NotCompiled(f"it was not compiled within {self.budget:.0f} seconds")
            self.say(path or "the model")
            known = self.kinds[key] = self.compile(module)
        adopt(known[0], module)
        began = time.perf_counter()
        try:
            with torch._dynamo.config.patch(SETTINGS):
                return known[1](*args, **kwargs)
        except Exception as error:  # a compiler may raise anything
            raise NotCompiled(f"it cannot be compiled: {first_line(error)}") from error
        finally:
            self.spent += time.perf_counter() - began

    def compile(self, module: nn.Module) -> tuple[nn.Module, Any]:
        """Return a copy of a module's structure and its compiled form, which is made at its first call."""
        made = copy_structure(module)
        try:
            return made, torch.compile(made, dynamic=False, backend=self.backend)
        except Exception as error:  # such as a backend that is not there
            raise NotCompiled(f"it cannot be compiled: {first_line(error)}") from error

    def kind_of(self, path: str, module: nn.Module, args: Any, kwargs: Any, eager: Any) -> object:
        """Return what modules share that one compiled form serves."""
        key = (signature(module), shape_of((args, kwargs)))
        known = self.kinds.get(key)
        if known is None:
            return key
        if (path, key) not in self.alike:
            adopt(known[0], module)
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                again = tensors_of(known[0](*args, **kwargs))
            self.alike[path, key] = same_bits(again, tensors_of(eager))
        return key if self.alike[path, key] else (path, key)


def count_graphs() -> int:
    """Return how many graphs torch.compile has captured in this process: none where all code is left eager."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def copy_structure(module: nn.Module) -> nn.Module:
    """Copy a module without its weights, which the copy shares."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def adopt(made: nn.Module, module: nn.Module) -> None:
    """Give a copy of a module's structure the weights of a module of the same kind."""
    for mine, its in zip(made.modules(), module.modules(), strict=True):
        mine._parameters.update(its._parameters)
        mine._buffers.update(its._buffers)


def signature(module: nn.Module) -> object:
    """Return what a module's compiled code may depend on, apart from values of weights and numbers of layers."""
    found: list[object] = []
    for name, sub in module.named_modules():
        plain = [
            (key, repr(value) if isinstance(value, PLAIN) else id_of(value))
            for key, value in sorted(vars(sub).items())
            if not key.startswith("_") and key not in NUMBERS
        ]
        tensors = [*sub.named_parameters(recurse=False), *sub.named_buffers(recurse=False)]
        shapes = [(key, spec_of(value)) for key, value in tensors]
        found.append((name, type(sub), tuple(plain), tuple(shapes)))
    return tuple(found)


def id_of(value: object) -> object:
    """Return what tells an attribute that is no plain value apart: its identity, as a configuration is shared."""
    return (type(value), id(value)) if not isinstance(value, Tensor) else spec_of(value)


def shape_of(values: object) -> object:
    """Return the structure of arguments with the specs of their tensors."""
    leaves, structure = _pytree.tree_flatten(values)
    kept = [
        spec_of(v) if isinstance(v, Tensor) else repr(v) if isinstance(v, PLAIN) else id_of(v)
        for v in leaves
    ]
    return (tuple(kept), str(structure))


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors have the same shapes, dtypes and bits."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and bits.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )
