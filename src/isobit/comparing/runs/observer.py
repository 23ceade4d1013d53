"""Record what a training script computes: every operator's results, losses, and the state after each optimizer step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from isobit import bits
from isobit.comparing.runs.evidence import random_states, short, surroundings
from isobit.comparing.runs.operators import (
    Operator,
    generator_state,
    numbers_in,
    read_operator,
    tensors_in,
)
from isobit.comparing.runs.places import Places
from isobit.comparing.runs.storages import EMPTY, MADE, OUTSIDE, Storages

MOST_ROWS = 4096  # of data from outside, whose order is looked at
LISTED = 8  # digests that a call lists; more are merged into one
_clock = time.perf_counter  # a fix may replace it
_process = os.getpid


class StepsDone(BaseException):
    """Ends the script after the last step; not an Exception, so that scripts do not catch it."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a run as lines of JSON; see compare.py for how two records are read."""

    def __init__(
        self, file: TextIO, places: Places, steps: int, tell: Callable[[int], None]
    ) -> None:
        """Record up to `steps` optimizer steps to a file; `tell` is called after each."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.file, self.places, self.steps, self.tell = file, places, steps, tell
        self.storages = Storages()
        self.known: dict[Any, Operator] = {}
        self.forward_places: dict[int, tuple[str, str]] = {}
        self.optimizers: dict[int, int] = {}
        self.step = self.calls = self.optimizer = 0
        self.quiet, self.in_step, self.done = False, False, False
        self.process = _process()
        self.spent, self.began = 0.0, _clock()
        self.warm: tuple[float, float] | None = None  # clock and time spent after the first step

    def is_own_process(self) -> bool:
        """Return False in a process that the script forked, such as a worker that loads data."""
        return _process() == self.process

    def write(self, kind: str, **event: Any) -> None:
        """Write one event."""
        self.file.write(json.dumps({"k": kind, "step": self.step, **event}) + "\n")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it."""
        keywords = kwargs or {}
        if self.quiet or not self.is_own_process():
            return func(*args, **keywords)
        began = _clock()
        operator = self.known.get(func)
        if operator is None:
            operator = self.known[func] = read_operator(func)
        inputs = self.read_inputs(operator, args, keywords)
        self.spent += _clock() - began
        result = func(*args, **keywords)
        began = _clock()
        self.record_call(operator, args, keywords, inputs, result)
        self.spent += _clock() - began
        return result

    def read_inputs(
        self, operator: Operator, args: Sequence[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what an operator reads: numbers of its memory, parts, data from outside, a random state."""
        written = {id(args[i]) for i, _ in operator.written if i < len(args)}
        memory, parts, outside = [], [], []
        for tensor in tensors_in([*args, *keywords.values()]):
            if operator.view and not isinstance(tensor, torch.nn.Parameter):
                continue
            found = self.storages.find(tensor)
            if found.origin == OUTSIDE and isinstance(tensor, torch.nn.Parameter):
                outside.append([found.number, bits.digest(tensor)[:16], OUTSIDE, ""])
                found.origin = MADE  # from now on it is hashed after each step
            if operator.view:
                continue
            overwritten = id(tensor) in written and (operator.overwrites or found.origin == EMPTY)
            if not overwritten:
                memory.append(found.number)
                if found.origin != MADE:
                    digest = bits.digest(tensor)[:16]
                    outside.append([found.number, digest, found.origin, rows_of(tensor)])
            parts.append((tensor.storage_offset(), tuple(tensor.shape), tensor.stride()))
        event: dict[str, Any] = {"in": memory, "x": outside}
        if parts:
            event["parts"] = hash_text(repr(parts))
        if operator.draws:
            state = generator_state(keywords, tuple(args))
            event["rng"] = None if state is None else bits.digest(state)[:16]
        return event

    def record_call(
        self,
        operator: Operator,
        args: Sequence[Any],
        keywords: dict[str, Any],
        inputs: dict[str, Any],
        result: Any,
    ) -> None:
        """Write the event of one call; views have none, unless they show a parameter from outside."""
        if operator.view:
            if inputs["x"]:
                self.write("in", x=inputs["x"])
            return
        targets = [args[i] if i < len(args) else keywords.get(n) for i, n in operator.written]
        outputs = {id(t): t for t in (*tensors_in(result), *tensors_in(targets))}.values()
        if not outputs:
            return
        origin = EMPTY if operator.unwritten else MADE
        numbers = [self.storages.made(tensor, origin).number for tensor in outputs]
        digests = [] if operator.unwritten else [bits.digest(t)[:16] for t in outputs]
        if len(digests) > LISTED:
            digests = [hash_text("".join(digests))]
        module, source, backward = self.find_place()
        self.write(
            "op",
            n=self.calls,
            op=operator.name,
            mod=module,
            src=source,
            back=backward,
            num=numbers_in((*args, *keywords.values())),
            out=numbers,
            d=digests,
            **inputs,
        )
        self.calls += 1

    def find_place(self) -> tuple[str, str, bool]:
        """Return module, source line, and whether this is the backward pass of a call seen before."""
        node = torch._C._current_autograd_node()
        if node is not None:
            found = self.forward_places.get(node._sequence_nr(), ("", "backward"))
            return (*found, True)
        module, source = self.places.find()
        if self.in_step:
            module = "optimizer step"
        elif torch.is_grad_enabled():
            sequence = torch._C._autograd._get_sequence_nr() - 1
            self.forward_places.setdefault(sequence, (module, source))
        return module, source, False

    def record_evidence(self, when: str = "rng") -> None:
        """Write random states, threads and variables: what the usual causes are checked with."""
        self.write("evidence", **{when: random_states()}, **surroundings())

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self.is_own_process():
            self.quietly(
                lambda: self.record_tensors("gradient", gradients_of(optimizer)), optimizer
            )
            self.in_step = True

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record parameters and optimizer state, and end the script after the last step."""
        if not self.is_own_process():
            return
        self.in_step = False
        if self.done:  # the script caught the end; nothing that it does now is recorded
            self.finish()
            os._exit(0)
        self.quietly(lambda: self.record_state(optimizer), optimizer)
        self.step += 1
        self.forward_places.clear()
        self.tell(self.step)
        if self.warm is None and self.step < self.steps:
            self.warm = _clock(), self.spent
        if self.step >= self.steps:
            self.done = True
            raise StepsDone
        self.quietly(self.record_evidence)

    def record_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record parameters, then the optimizer's tensors."""
        self.record_tensors("parameter", parameters_of(optimizer))
        found = []
        for index, parameter in parameters_of(optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found.append((f"{index}/{key}", value))
        self.record_tensors("optimizer state", found)

    def quietly(self, record: Callable[[], None], optimizer: Any = None) -> None:
        """Record without seeing the operators that recording needs."""
        began = _clock()
        self.quiet = True
        if optimizer is not None:
            self.find_optimizer(optimizer)
        try:
            record()
        finally:
            self.quiet = False
            self.spent += _clock() - began

    def find_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which optimizer is stepping; write the names of its parameters once."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = len(self.optimizers)
            known = self.places.parameter_names()
            names = {i: known.get(id(p), f"parameter {i}") for i, p in parameters_of(optimizer)}
            self.write("names", opt=self.optimizers[id(optimizer)], names=names)
        self.optimizer = self.optimizers[id(optimizer)]

    def record_tensors(self, what: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the digests of some tensors of the training's state."""
        named = [(name, t) for name, t in tensors if any(True for _ in tensors_in(t))]
        self.write(
            "state",
            what=what,
            opt=self.optimizer,
            names=[name for name, _ in named],
            d=[bits.digest(t)[:16] for _, t in named],
            s=[self.storages.find(t).number for _, t in named],
        )

    def record_loss(self, tensors: Any) -> None:
        """Record what the script calls backward on."""
        self.record_evidence("rng_at_loss")
        found = list(tensors_in(tensors if isinstance(tensors, list | tuple) else [tensors]))
        self.write(
            "state",
            what="loss",
            opt=self.optimizer,
            names=["" for _ in found],
            d=[bits.digest(t)[:16] for t in found],
            s=[self.storages.find(t).number for t in found],
            values=[repr(t.item()) if t.numel() == 1 else "" for t in found],
        )

    def finish(self) -> None:
        """Write the end of the record."""
        began, spent = self.warm or (self.began, 0.0)
        times = {"seconds": _clock() - began, "spent": self.spent - spent}
        self.write("end", calls=self.calls, **times)
        self.file.flush()

    def install(self) -> None:
        """Watch optimizers and backward passes; operators are watched while the mode is entered."""
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        backward = torch.autograd.backward

        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_own_process() and not self.quiet:
                self.quietly(lambda: self.record_loss(tensors))
            return backward(tensors, *args, **kwargs)

        torch.autograd.backward = recorded
        self.quietly(self.record_evidence)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of an optimizer, numbered by group and place."""
    return [
        (f"{g}.{i}", parameter)
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return the gradients that are there."""
    return [(i, p.grad) for i, p in parameters_of(optimizer) if p.grad is not None]


def rows_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's rows in any order; "" if there are none or too many."""
    if tensor.dim() == 0 or not 1 < tensor.shape[0] <= MOST_ROWS or not tensor.numel():
        return ""
    return hash_text("".join(sorted(bits.digest(row) for row in tensor)))


def hash_text(text: str) -> str:
    """Return a short digest of a text."""
    return short(text.encode())
