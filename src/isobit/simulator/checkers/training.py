"""Watches training inside a world: hooks on optimizers and modules note what ranks do; whole steps are judged."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import dropout
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from isobit.simulator import rank as ranks
from isobit.simulator.checkers.early_reads import memory_of, overlap
from isobit.simulator.checkers.odd_ranks import (
    digest,
    find_odd,
    group_ranks,
    is_constant,
    keep,
    say_groups,
)
from isobit.simulator.checkers.replicas import (
    Pair,
    Start,
    Step,
    find_replicas,
    judge_step,
    judge_tensor,
)
from isobit.simulator.checkers.training_errors import Told, as_error
from isobit.simulator.collectives import Call, name_of

if TYPE_CHECKING:
    from isobit.simulator.world import World

LONGEST_DRIFT = 16
"""Steps that ranks may be apart with copies kept to say where parameters part; beyond, only digests are."""


def unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """What the hook itself reads is not the program's doing; outside the world it does nothing."""

    @functools.wraps(hook)
    def run(self: Training, *args: Any) -> None:
        if not ranks.inside():
            return
        rank = ranks.current()
        before, rank.communicating = rank.communicating, True
        try:
            hook(self, rank.index, *args)
        finally:
            rank.communicating = before

    return run


class Notes:
    """What one rank has noted since its last step."""

    def __init__(self) -> None:
        self.ordinals: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.counts: dict[int, int] = defaultdict(int)
        self.named: dict[tuple[str, tuple[int, ...], bool], int] = defaultdict(int)
        self.names: dict[int, str] = {}
        self.hooked: dict[int, nn.Parameter] = {}
        self.seen: WeakSet[nn.Module] = WeakSet()
        self.depth = 0
        self.clear()

    def clear(self) -> None:
        """A step is done."""
        self.data: list[str] = []
        self.masks: list[str] = []
        self.summed: set[int] = set()
        self.poisoned = False


class Training:
    """The notes of all ranks; only the first bug is told, since later ones follow from it."""

    def __init__(self, world: World) -> None:
        self.world, self.ranks, self.ledger = world, world.ranks, world.ledger
        self.notes = [Notes() for _ in range(world.ranks)]
        self.starts: dict[int, dict[int, Start]] = defaultdict(dict)
        self.steps: dict[tuple[int, int], dict[int, Step]] = defaultdict(dict)
        self.judged: set[tuple[int, int]] = set()
        self.buffers: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
        self.tensors: dict[tuple[str, int, tuple[int, ...], bool], dict[int, Tensor]] = defaultdict(
            dict
        )
        self.talked: set[Pair] = set()
        self.told: Told | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks on every optimizer and module of the process; calls from outside the world pass unseen."""
        with ExitStack() as stack:
            for handle in (
                optimizers.register_optimizer_step_pre_hook(self._before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
                modules.register_module_forward_pre_hook(self._before_forward),
                modules.register_module_forward_hook(
                    self._after_forward, with_kwargs=True, always_call=True
                ),
            ):
                stack.callback(handle.remove)
                # torch 2.13 leaves this mark of a hook that is gone, and torch.compile warns of it.
                stack.callback(modules._global_forward_hooks_with_kwargs.pop, handle.id, None)
            if self.ledger is not None:
                stack.callback(
                    modules.register_module_parameter_registration_hook(
                        self._after_registration
                    ).remove
                )
            yield

    def note_call(self, call: Call) -> None:
        """A rank gives tensors to a collective; into sums it may bring what is not finite."""
        notes = self.notes[call.rank]
        if call.op is not None and name_of(call.op) in ("SUM", "AVG"):
            if call.kind == "all_reduce":
                notes.summed.update(tensor.data_ptr() for tensor in call.inputs)
            notes.poisoned = notes.poisoned or not all(map(_is_finite, call.inputs))

    def note_message(self, sender: int, receiver: int) -> None:
        """Two ranks that send each other messages are stages of something, not replicas."""
        self.talked.add(frozenset((sender, receiver)))

    def note_tensor(
        self, rank: int, name: str, tensor: Tensor, members: tuple[int, ...], alike: bool
    ) -> None:
        """A script says that a tensor is the same on these ranks, or distinct."""
        count = self.notes[rank].named[name, members, alike]
        self.notes[rank].named[name, members, alike] += 1
        if alike and self.ledger is not None:
            self.ledger.note(rank, f"probe {count}", name, tensor)
        held = self.tensors[name, count, members, alike]
        held[rank] = tensor.detach().clone()
        if len(held) == len(members):
            self._say(
                judge_tensor(self.tensors.pop((name, count, members, alike)), name, count, alike)
            )

    def finish(self) -> None:
        """Judges steps that not every rank made."""
        for key in sorted(self.steps, key=lambda key: key[::-1]):
            self._judge(key)
        for used in sorted(self.buffers):
            self._judge_buffer(used)
        for (name, count, _, alike), held in list(self.tensors.items()):
            self._say(judge_tensor(held, name, count, alike))

    @unseen
    def _before_step(self, rank: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        notes, parameters = self.notes[rank], _plain_parameters(optimizer)
        ordinal = notes.ordinals.setdefault(optimizer, len(notes.ordinals))
        names = tuple(notes.names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters))
        if ordinal not in notes.counts:
            varied = any(not is_constant(p) for p in parameters)
            shapes = tuple(f"{p.dtype}{list(p.shape)}" for p in parameters)
            self.starts[ordinal][rank] = Start(tuple(map(digest, parameters)), shapes, varied)
        if self.ledger is not None:
            self.ledger.note_step(rank, notes.counts[ordinal], parameters, names)
        gradients = [_plain_gradient(p) for p in parameters]
        held = [g for g in gradients if g is not None]
        scaled = (
            getattr(optimizer, "found_inf", None) is not None
        )  # it will skip the step by itself
        self.steps[ordinal, notes.counts[ordinal]][rank] = Step(
            parameters=parameters,
            names=names,
            gradients=tuple(map(digest, gradients)),
            infinite=None
            if scaled
            else next((i for i, g in enumerate(gradients) if not _is_finite(g)), None),
            summed=bool(held) and all(g.data_ptr() in notes.summed for g in held),
            poisoned=notes.poisoned,
            data=tuple(notes.data),
            masks=tuple(notes.masks),
            pending=_owned_by_pending(names, gradients),
            site=ranks.user_line(sys._getframe()),
        )
        notes.clear()

    @unseen
    def _after_step(self, rank: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self.notes[rank].ordinals:
            return
        ordinal = self.notes[rank].ordinals[optimizer]
        key = ordinal, self.notes[rank].counts[ordinal]
        self.notes[rank].counts[ordinal] += 1
        step = self.steps[key][rank]
        step.values = tuple(map(digest, step.parameters))
        drifted = len(self.steps) > LONGEST_DRIFT
        step.kept = (None,) * len(step.parameters) if drifted else tuple(map(keep, step.parameters))
        if len(self.steps[key]) == self.ranks and all(
            note.values for note in self.steps[key].values()
        ):
            self._judge(key)

    def _judge(self, key: tuple[int, int]) -> None:
        if key in self.judged or self.told:
            return
        self.judged.add(key)
        ordinal, count = key
        complete = {rank: step for rank, step in self.steps[key].items() if step.values}
        before = self.steps.get((ordinal, count - 1))
        for told in judge_step(complete, self.starts[ordinal], count, before, self.talked):
            self._say(told)
        for old in [old for old in self.steps if old[0] == ordinal and old[1] < count]:
            del self.steps[old]

    @unseen
    def _before_forward(self, rank: int, module: nn.Module, inputs: Any) -> None:
        notes = self.notes[rank]
        notes.depth += 1
        if notes.depth == 1 and module not in notes.seen:
            notes.seen.add(module)
            named = [*module.named_parameters(), *module.named_modules()]
            notes.names.update({id(part): name.removeprefix("module.") for name, part in named})
        if isinstance(module, dropout._DropoutNd) and module.training and module.p > 0:
            notes.masks.append(digest(torch.get_rng_state()))
        if (
            not module.training and module._buffers
        ):  # where they are used: a wrapper may broadcast them just before
            self._note_buffers(rank, module)

    @unseen
    def _after_forward(
        self, rank: int, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        notes = self.notes[rank]
        notes.depth -= 1
        if notes.depth == 0 and module.training and torch.is_grad_enabled():
            notes.data.extend(digest(x) for x in tree_leaves((args, kwargs)) if type(x) is Tensor)

    @unseen
    def _after_registration(
        self, rank: int, module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> None:
        """Autograd's own sum must be seen before anyone reduces it, so the hook is there from the parameter's birth."""
        ledger = self.ledger
        if (
            ledger is None
            or type(parameter) is not nn.Parameter
            or id(parameter) in self.notes[rank].hooked
        ):
            return
        self.notes[rank].hooked[id(parameter)] = (
            parameter  # alive, so that the number stays its own
        )
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: ledger.note_own(rank, p)
            )

    def _note_buffers(self, rank: int, module: nn.Module) -> None:
        notes = self.notes[rank]
        count, path = sum(notes.counts.values()), notes.names.get(id(module), "")
        for name, buffer in module._buffers.items():
            key = count, f"{path}.{name}" if path else name
            if type(buffer) is Tensor and rank not in self.buffers[key]:
                self.buffers[key][rank] = digest(buffer)
                if len(self.buffers[key]) == self.ranks:
                    self._judge_buffer(key)

    def _judge_buffer(self, key: tuple[int, str]) -> None:
        """Replicas that evaluate with statistics of their own."""
        count, name = key
        for group in find_replicas(self.starts[0], self.talked):
            held = {rank: self.buffers[key][rank] for rank in group if rank in self.buffers[key]}
            if len(group_ranks(held)) > 1:
                text = f"{name} is not equal when the model is evaluated after {count} steps: {say_groups(held)}"
                self._say(Told("buffers differ", find_odd(held), name, text))

    def _say(self, told: Told | None) -> None:
        if told is None or self.told is not None or told.kind in self.world.ignore:
            return
        self.told = told
        self.world.tell(as_error(told))


def _plain_parameters(optimizer: Optimizer) -> list[Tensor]:
    """What a rank holds whole: sharded tensors (DTensor) are their own class."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in held if type(p) in (Tensor, nn.Parameter)]


def _plain_gradient(parameter: Tensor) -> Tensor | None:
    """Dense, if it is sparse; none, if it is of a class that only knows how to add."""
    gradient = parameter.grad
    if type(gradient) is not Tensor:
        return None
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _owned_by_pending(names: Sequence[str], gradients: Sequence[Tensor | None]) -> str:
    """The first gradient that shares memory with the result of work under way, and that work."""
    for work in ranks.current().pending.values():
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and overlap(memory_of([gradient]), work.memory):
                return f"the gradient of {name}, which {work.what} owns"
    return ""


def _is_finite(tensor: Tensor | None) -> bool:
    if tensor is None or not tensor.is_floating_point():
        return True
    wide = (
        tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    )  # torch has no isfinite of fp8
    return bool(torch.isfinite(wide).all())
