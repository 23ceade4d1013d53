"""Training: hooks on optimizers and modules record each step of each rank, and complete steps are checked.

The checks themselves are in `replicas.py`.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.dropout import AlphaDropout, Dropout1d, Dropout2d, Dropout3d
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from isobit.majority import count_votes
from isobit.simulator import probe
from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import user_line
from isobit.simulator.checkers.habits import Habits, check_ends, watching_habits
from isobit.simulator.checkers.replicas import Pair, check_step, check_tensor, find_replicas
from isobit.simulator.checkers.step_copies import StepCopies
from isobit.simulator.checkers.step_record import (
    Start,
    Step,
    copy_if_small,
    digest,
    is_constant,
    is_finite,
    plain_gradient,
    plain_parameters,
)
from isobit.simulator.checkers.training_findings import TrainingFinding, as_error
from isobit.simulator.collectives import Call, name_of
from isobit.simulator.findings import Findings
from isobit.simulator.memory import memory_of, overlap

MASKED = (
    Dropout1d,
    Dropout2d,
    Dropout3d,
    AlphaDropout,
)  # nn.Dropout calls the function, which is watched
LONGEST_DRIFT = 16  # steps that ranks may be apart; beyond, only digests of parameters are kept


def rank_hook(hook: Callable[..., None]) -> Callable[..., None]:
    """Call a hook with the index of the rank, and only on a rank; its own reads are not the program's."""

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
    """What one rank has done since its last step, and what is known of its modules and optimizers."""

    def __init__(self) -> None:
        """Start without any step."""
        self.ordinals: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.counts: dict[int, int] = defaultdict(int)
        self.named: dict[tuple[str, tuple[int, ...], bool], int] = defaultdict(int)
        self.names: dict[int, str] = {}
        self.hooked: dict[int, nn.Parameter] = {}
        self.seen: WeakSet[nn.Module] = WeakSet()
        self.depth = 0
        self.clear()

    def clear(self) -> None:
        """Forget what belongs to the last step."""
        self.data: list[str] = []
        self.masks: list[str] = []
        self.summed: set[int] = set()
        self.poisoned = False


class Training:
    """The notes of all ranks. Only the first finding is reported, since later ones may follow from it.

    Args:
        ranks: The number of ranks.
        findings: Where the finding goes.
        ignore: Kinds of findings to leave out.
        copies: Where to copy gradients, if the run is to be compared with another.
    """

    def __init__(
        self, ranks: int, findings: Findings, ignore: Collection[str], copies: StepCopies | None
    ) -> None:
        """Start without any step; see the arguments above."""
        self.ranks, self.findings, self.ignore, self.copies = ranks, findings, ignore, copies
        self.notes = [Notes() for _ in range(ranks)]
        self.habits = [Habits() for _ in range(ranks)]
        self.starts: dict[int, dict[int, Start]] = defaultdict(dict)
        self.steps: dict[tuple[int, int], dict[int, Step]] = defaultdict(dict)
        self.checked: set[tuple[int, int]] = set()
        self.buffers: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
        self.tensors: dict[tuple[str, int, tuple[int, ...], bool], dict[int, Tensor]] = defaultdict(
            dict
        )
        self.talked: set[Pair] = set()
        self.found: TrainingFinding | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install hooks on every optimizer and module of the process, and listen to probes."""
        with ExitStack() as stack:
            stack.enter_context(probe.listening(self.note_tensor))
            stack.enter_context(watching_habits(self.habits, self._note_mask))
            for handle in (
                optimizers.register_optimizer_step_pre_hook(self._before_step),
                optimizers.register_optimizer_step_post_hook(self._after_step),
                modules.register_module_forward_pre_hook(self._before_forward),
                modules.register_module_forward_hook(
                    self._after_forward, with_kwargs=True, always_call=True
                ),
            ):
                stack.callback(handle.remove)
                # torch 2.13 keeps this entry of a removed hook, and torch.compile warns of it.
                stack.callback(modules._global_forward_hooks_with_kwargs.pop, handle.id, None)
            if self.copies is not None:
                stack.callback(
                    modules.register_module_parameter_registration_hook(
                        self._after_registration
                    ).remove
                )
            yield

    def note_call(self, call: Call) -> None:
        """Note which tensors a collective sums, and whether a rank sends numbers that are not finite."""
        notes = self.notes[call.rank]
        if call.op is not None and name_of(call.op) in ("SUM", "AVG"):
            if call.kind == "all_reduce":
                notes.summed.update(tensor.data_ptr() for tensor in call.inputs)
            notes.poisoned = notes.poisoned or not all(map(is_finite, call.sources))

    def note_message(self, sender: int, receiver: int) -> None:
        """Note that two ranks send each other messages: they are pipeline stages, not replicas."""
        self.talked.add(frozenset((sender, receiver)))

    def note_tensor(
        self, rank: int, name: str, tensor: Tensor, members: tuple[int, ...], alike: bool
    ) -> None:
        """Note a tensor shown by a probe; check it once all `members` have shown theirs."""
        count = self.notes[rank].named[name, members, alike]
        self.notes[rank].named[name, members, alike] += 1
        if alike and self.copies is not None:
            self.copies.note(rank, f"probe {count}", name, tensor)
        held = self.tensors[name, count, members, alike]
        held[rank] = tensor.detach().clone()
        if len(held) == len(members):
            del self.tensors[name, count, members, alike]
            self._report(check_tensor(held, name, count, alike))

    def finish(self) -> None:
        """Check what not every rank has done, at the end of the run."""
        for key in sorted(self.steps, key=lambda key: key[::-1]):
            self._check_step(key)
        for used in sorted(self.buffers):
            self._check_buffer(used)
        for (name, count, _, alike), held in list(self.tensors.items()):
            self._report(check_tensor(held, name, count, alike))
        for finding in check_ends(dict(enumerate(self.habits))):
            self._report(finding)

    @rank_hook
    def _before_step(self, rank: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        notes, parameters = self.notes[rank], plain_parameters(optimizer)
        ordinal = notes.ordinals.setdefault(optimizer, len(notes.ordinals))
        names = tuple(notes.names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters))
        if ordinal not in notes.counts:
            varied = any(not is_constant(p) for p in parameters)
            shapes = tuple(f"{p.dtype}{list(p.shape)}" for p in parameters)
            self.starts[ordinal][rank] = Start(tuple(map(digest, parameters)), shapes, varied)
        if self.copies is not None:
            self.copies.note_step(rank, notes.counts[ordinal], parameters, names)
        gradients = [plain_gradient(p) for p in parameters]
        held = [g for g in gradients if g is not None]
        infinite = next((i for i, g in enumerate(gradients) if not is_finite(g)), None)
        if getattr(optimizer, "found_inf", None) is not None:  # GradScaler skips such a step
            infinite = None
        self.steps[ordinal, notes.counts[ordinal]][rank] = Step(
            parameters=parameters,
            names=names,
            gradients=tuple(map(digest, gradients)),
            infinite=infinite,
            summed=bool(held) and all(g.data_ptr() in notes.summed for g in held),
            poisoned=notes.poisoned,
            data=tuple(notes.data),
            masks=tuple(notes.masks),
            pending=_owned_by_pending(names, gradients),
            site=user_line(sys._getframe()),
            habits=self.habits[rank].note_step(parameters, gradients),
        )
        notes.clear()

    @rank_hook
    def _after_step(self, rank: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self.notes[rank].ordinals:
            return
        ordinal = self.notes[rank].ordinals[optimizer]
        key = ordinal, self.notes[rank].counts[ordinal]
        self.notes[rank].counts[ordinal] += 1
        step = self.steps[key][rank]
        step.values = tuple(map(digest, step.parameters))
        drifted = len(self.steps) > LONGEST_DRIFT
        step.kept = tuple(None if drifted else copy_if_small(p) for p in step.parameters)
        if len(self.steps[key]) == self.ranks and all(
            note.values for note in self.steps[key].values()
        ):
            self._check_step(key)

    def _check_step(self, key: tuple[int, int]) -> None:
        if key in self.checked or self.found:
            return
        self.checked.add(key)
        ordinal, count = key
        complete = {rank: step for rank, step in self.steps[key].items() if step.values}
        before = self.steps.get((ordinal, count - 1))
        for finding in check_step(complete, self.starts[ordinal], count, before, self.talked):
            self._report(finding)
        for old in [old for old in self.steps if old[0] == ordinal and old[1] < count]:
            del self.steps[old]

    @rank_hook
    def _before_forward(self, rank: int, module: nn.Module, inputs: Any) -> None:
        notes = self.notes[rank]
        notes.depth += 1
        if notes.depth == 1:
            self.habits[rank].evaluating = not module.training
            if module.training:
                self.habits[rank].roots[id(module)] = module
        if notes.depth == 1 and module not in notes.seen:
            notes.seen.add(module)
            named = [*module.named_parameters(), *module.named_modules()]
            notes.names.update({id(part): name.removeprefix("module.") for name, part in named})
        if isinstance(module, MASKED) and module.training and module.p > 0:
            self._note_mask(rank)
        if not module.training and module._buffers:
            self._note_buffers(rank, module)  # here: a wrapper may broadcast them just before

    def _note_mask(self, rank: int) -> None:
        """Note that dropout draws a mask, from the current state of the random numbers."""
        self.notes[rank].masks.append(digest(torch.get_rng_state()))

    @rank_hook
    def _after_forward(self, rank: int, module: nn.Module, args: Any, *rest: Any) -> None:
        kwargs = rest[0] if len(rest) == 2 else {}  # torch leaves them out after an exception
        notes = self.notes[rank]
        notes.depth -= 1
        if notes.depth == 0 and module.training and torch.is_grad_enabled():
            notes.data.extend(digest(x) for x in tree_leaves((args, kwargs)) if type(x) is Tensor)

    @rank_hook
    def _after_registration(
        self, rank: int, module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> None:
        """Add a hook that copies the gradient before any wrapper's hook can reduce it."""
        copies, hooked = self.copies, self.notes[rank].hooked
        if copies is None or type(parameter) is not nn.Parameter or id(parameter) in hooked:
            return
        hooked[id(parameter)] = parameter  # kept alive, so that its id stays unique
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda p: copies.note_own(rank, p)
            )

    def _note_buffers(self, rank: int, module: nn.Module) -> None:
        notes = self.notes[rank]
        count, path = sum(notes.counts.values()), notes.names.get(id(module), "")
        for name, buffer in module._buffers.items():
            key = count, f"{path}.{name}" if path else name
            if type(buffer) is Tensor and rank not in self.buffers[key]:
                self.buffers[key][rank] = digest(buffer)
                if len(self.buffers[key]) == self.ranks:
                    self._check_buffer(key)

    def _check_buffer(self, key: tuple[int, str]) -> None:
        """Find replicas that evaluate with different buffers, such as BatchNorm statistics."""
        count, name = key
        for group in find_replicas(self.starts[0], self.talked):
            held = {rank: self.buffers[key][rank] for rank in group if rank in self.buffers[key]}
            vote = count_votes(held)
            if not vote.is_unanimous:
                text = f"{name} differs when the model is evaluated after {count} steps: {vote}"
                self._report(TrainingFinding("buffers differ", vote.suspects, text))

    def _report(self, finding: TrainingFinding | None) -> None:
        if finding is None or self.found is not None or finding.kind in self.ignore:
            return
        self.found = finding
        self.findings.stop(as_error(finding))


def _owned_by_pending(names: Sequence[str], gradients: Sequence[Tensor | None]) -> str:
    """Describe the first gradient that shares memory with the result of a collective in progress."""
    for work in ranks.current().pending.values():
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and overlap(memory_of([gradient]), work.memory):
                return f"the gradient of {name}, the result of {work.what},"
    return ""
