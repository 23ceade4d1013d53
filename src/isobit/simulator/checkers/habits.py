"""Habits of training loops that no comparison of ranks shows: every rank, and one rank alone, would do the same.

Kept gradients, parameters that no optimizer has, dropout while evaluating, one order of samples for all epochs, and a
file that several ranks write. Notes are made on each rank; `check_habits` looks at those of one step of all ranks.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import user_line
from isobit.simulator.checkers.step_record import digest, is_constant, local_gradient
from isobit.simulator.findings import TrainingFinding
from isobit.simulator.program.process_state import replaced


@dataclass(frozen=True)
class StepHabits:
    """What one rank did before one step.

    Attributes:
        kept: A parameter whose gradient was added to that of the step before.
        trained: Parameters that have a gradient.
        owned: Parameters that an optimizer of this rank has.
        order: The epoch that a sampler has used for a second time.
    """

    kept: str = ""
    trained: frozenset[str] = frozenset()
    owned: frozenset[str] = frozenset()
    order: int | None = None


@dataclass
class SteppedGradient:
    """The gradient of the last step of a parameter, and what has become of it since.

    Attributes:
        parameter: The parameter.
        before: The digest of the gradient that its optimizer read.
        is_seen: Whether a backward has begun since.
        is_kept: Whether the first one began with this gradient, and none with a cleared one.
    """

    parameter: Tensor
    before: str
    is_seen: bool = False
    is_kept: bool = False

    def note_backward(self) -> None:
        """Look at the gradient with which a backward begins."""
        if self.is_seen and not self.is_kept:
            return
        gradient = local_gradient(self.parameter)
        if self.is_seen:
            self.is_kept = gradient is not None and not is_zero(gradient)
            return
        self.is_seen = True
        self.is_kept = (
            gradient is not None and digest(gradient) == self.before and not is_zero(gradient)
        )


@dataclass
class Habits:
    """What one rank has done so far."""

    owned: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, nn.Module] = field(default_factory=dict)
    stepped: dict[int, SteppedGradient] = field(default_factory=dict)
    sampler: tuple[int, int, int] | None = None  # (sampler, its epoch, number of the iteration)
    iterations: int = 0
    orders: dict[tuple[int, int], int] = field(default_factory=dict)
    begun: Counter[int] = field(default_factory=Counter)  # epochs of each sampler
    evaluating: bool = False
    evaluated: bool = False
    awake: str = ""  # where dropout was left on while evaluating
    written: dict[str, str] = field(default_factory=dict)

    def note_backward(self) -> None:
        """Look for gradients of earlier steps that nobody has cleared.

        The pass may be one of another model: a generator is trained through a discriminator whose gradients are
        cleared before its own next step. So a gradient counts as kept when its parameter's next step reads it.
        """
        for each in self.stepped.values():
            each.note_backward()

    def note_step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> StepHabits:
        """Return what was done before this step, and start with the next."""
        order = None
        if self.sampler is not None:
            number, epoch, iteration = self.sampler
            if self.orders.setdefault((number, epoch), iteration) != iteration:
                order = epoch
        named = {n: p for m in self.roots.values() for n, p in m.named_parameters()}
        plain = {
            n.removeprefix("module."): p
            for n, p in named.items()
            if type(p) is nn.Parameter or isinstance(p, DTensor)
        }
        ended = [self.stepped.pop(id(parameter), None) for parameter in parameters]
        kept = next((each.parameter for each in ended if each and each.is_kept), None)
        seen = StepHabits(
            "" if kept is None else name_of(self.roots.values(), kept),
            frozenset(n for n, p in plain.items() if p.requires_grad and p.grad is not None),
            frozenset(n for n, p in plain.items() if id(p) in self.owned),
            order,
        )
        self.stepped |= {
            id(p): SteppedGradient(p, digest(g))
            for p, g in zip(parameters, gradients, strict=True)
            if g is not None
        }
        return seen


def is_zero(tensor: Tensor) -> bool:
    """Return whether all elements are 0."""
    return is_constant(tensor) and (tensor.numel() == 0 or not bool(tensor.detach().reshape(-1)[0]))


def name_of(roots: Any, parameter: Tensor) -> str:
    """Return the name of a parameter in one of the modules."""
    for root in roots:
        for name, other in root.named_parameters():
            if other is parameter:
                return str(name).removeprefix("module.")
    return "a parameter"


def check_habits(steps: Mapping[int, StepHabits], step: int) -> Iterator[TrainingFinding]:
    """Find habits that are wrong whatever the other ranks do."""
    kept = tuple(sorted(rank for rank, habits in steps.items() if habits.kept))
    if kept:
        text = f"the gradient of {steps[kept[0]].kept} at step {step} has that of the step before in it"
        yield TrainingFinding("gradients kept", kept, text)
    again = tuple(sorted(rank for rank, habits in steps.items() if habits.order is not None))
    if again:
        text = f"step {step} has samples in the order of an earlier pass: epoch {steps[again[0]].order} again"
        yield TrainingFinding("order repeated", again, text)
    if step == 0:  # an optimizer may be made after the first step
        return
    owned = frozenset().union(*(habits.owned for habits in steps.values()))
    missed = {r: sorted(h.trained - owned) for r, h in steps.items() if h.trained - owned}
    if missed:
        names = missed[min(missed)]
        text = f"no optimizer has {names[0]}, which has a gradient at step {step} ({len(names)} such parameters)"
        yield TrainingFinding("not updated", tuple(sorted(missed)), text)


def check_ends(habits: Mapping[int, Habits]) -> Iterator[TrainingFinding]:
    """Find what shows at the end of a run."""
    awake = {rank: notes.awake for rank, notes in habits.items() if notes.awake}
    if awake:
        text = "dropout is on while the model is evaluated"
        yield TrainingFinding("dropout on", tuple(sorted(awake)), text, awake)
    writers: dict[str, dict[int, str]] = defaultdict(dict)
    for rank, notes in habits.items():
        for path, site in notes.written.items():
            writers[path][rank] = site
    for path, sites in writers.items():
        if len(sites) > 1:
            text = f"torch.save to {os.path.basename(path)} on several ranks"
            yield TrainingFinding("file shared", tuple(sorted(sites)), text, sites)


class HabitWatch:
    """Functions that note what a rank does, and then call the function of torch that they replace."""

    def __init__(self, habits: Sequence[Habits], masks: Callable[[int], None]) -> None:
        """Watch all ranks; `masks(rank)` is called when functional dropout draws."""
        self.habits, self.masks = habits, masks

    def here(self) -> Habits | None:
        """Return the notes of the current rank."""
        return self.habits[ranks.current().index] if ranks.inside() else None

    def dropout(
        self,
        plain: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        """Note a mask, and dropout while the model is evaluated."""
        notes = self.here()
        if notes is not None and training and p > 0:
            if notes.evaluating and not torch.is_grad_enabled() and not notes.awake:
                notes.awake = user_line(sys._getframe(1))
            self.masks(ranks.current().index)
        return plain(input, p, training, inplace)

    def attention(self, plain: Any, *args: Any, **options: Any) -> Any:
        """Note the mask of attention's own dropout."""
        if ranks.inside() and (options.get("dropout_p") or (len(args) > 4 and args[4])):
            self.masks(ranks.current().index)
        return plain(*args, **options)

    def iterate(self, plain: Any, sampler: Any) -> Any:
        """Note that a sampler starts an epoch."""
        notes = self.here()
        if notes is not None and sampler.shuffle:
            notes.iterations += 1
            notes.begun[id(sampler)] += 1
            notes.sampler = (id(sampler), sampler.epoch, notes.iterations)
        return plain(sampler)

    def add(self, plain: Any, optimizer: Any, param_group: Any) -> None:
        """Note the parameters of an optimizer."""
        plain(optimizer, param_group)
        notes = self.here()
        if notes is not None:
            notes.owned.update({id(p): p for p in optimizer.param_groups[-1]["params"]})

    def backward(self, plain: Any, *args: Any, **options: Any) -> Any:
        """Look at the gradients before a backward pass."""
        notes = self.here()
        if notes is not None and options.get("accumulate_grad"):
            notes.note_backward()
        return plain(*args, **options)

    def save(self, plain: Any, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        """Note the path of a file."""
        notes = self.here()
        if notes is not None and isinstance(f, (str, os.PathLike)):
            notes.written[os.path.abspath(f)] = user_line(sys._getframe(1))
        plain(obj, f, *args, **options)


@contextmanager
def watching_habits(habits: Sequence[Habits], masks: Callable[[int], None]) -> Iterator[None]:
    """Watch torch's functions while a world runs; see `HabitWatch`."""
    watch, functional = HabitWatch(habits, masks), torch.nn.functional
    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (functional, "dropout", watch.dropout),
        (functional, "scaled_dot_product_attention", watch.attention),
        (DistributedSampler, "__iter__", watch.iterate),
        (Optimizer, "add_param_group", watch.add),
        (torch.autograd, "_engine_run_backward", watch.backward),
        (torch, "save", watch.save),
    )
    with ExitStack() as stack:
        for owner, name, function in places:
            plain = getattr(owner, name)
            value = functools.wraps(plain)(bind(function, plain))
            stack.enter_context(replaced(owner, name, value))
        yield


def bind(watch: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """Return a function that calls a watch with the function that it watches."""
    return lambda *args, **options: watch(plain, *args, **options)
