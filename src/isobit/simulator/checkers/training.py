"""Training: hooks on optimizers and modules record each step of each rank, and complete steps are checked.

The checks themselves are in `replicas.py`.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.dropout import AlphaDropout, Dropout1d, Dropout2d, Dropout3d
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from isobit.foundation.majority import count_votes, name_ranks
from isobit.simulator import probe
from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import user_line
from isobit.simulator.checkers.habits import Habits, check_ends, watching_habits
from isobit.simulator.checkers.replicas import (
    Compared,
    DataParallel,
    Pair,
    check_step,
    check_tensor,
    find_replicas,
)
from isobit.simulator.checkers.step_record import (
    Start,
    Step,
    StepCopies,
    copy_if_small,
    digest,
    is_constant,
    is_finite,
    local_gradient,
    plain_gradient,
    plain_parameters,
    settings_of,
    sharded_parameters,
)
from isobit.simulator.collectives import Call, name_of
from isobit.simulator.findings import LEADS_TO, Findings, TrainingFinding, as_error
from isobit.simulator.rank import memory_of, overlap

MASKED = (
    Dropout1d,
    Dropout2d,
    Dropout3d,
    AlphaDropout,
)  # nn.Dropout calls the function, which is watched
STEPS_AFTER = 100
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
        self.summed: set[tuple[int, int]] = set()  # (address, number of elements)
        self.poisoned = False


class Training:
    """The notes of all ranks. A finding does not end the run at once: it may have other faults, of later steps too.

    Each kind is reported once, with the ranks of all steps. A finding that may follow from one of an earlier step says
    so. A run with findings ends `STEPS_AFTER` steps after the first, since wrong numbers may keep a loop from ending.

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
        self.parallel, self.compared = DataParallel(), Compared()
        self.shards: set[int] = (
            set()
        )  # ranks whose optimizers have shards, or tensors of other classes
        self.reported: dict[
            str, tuple[int, int, TrainingFinding]
        ] = {}  # kind: (step, place, finding)
        self.ends_after: int | None = None  # steps of a rank

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
        self.parallel.note_call(call, notes.depth > 0)
        if call.op is not None and name_of(call.op) in ("SUM", "AVG"):
            if call.kind == "all_reduce":
                notes.summed.update((t.data_ptr(), t.numel()) for t in call.inputs)
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
        if self.ends_after is not None and sum(notes.counts.values()) >= self.ends_after:
            self.findings.end()
        if len(parameters) < sum(len(group["params"]) for group in optimizer.param_groups):
            self.shards.add(rank)
        ordinal = notes.ordinals.setdefault(optimizer, len(notes.ordinals))
        if ordinal not in notes.counts:
            varied = any(not is_constant(p) for p in parameters)
            shapes = tuple(f"{p.dtype}{list(p.shape)}" for p in parameters)
            self.starts[ordinal][rank] = Start(tuple(map(digest, parameters)), shapes, varied)
        if len(args) < 2 and kwargs.get("closure") is None:
            self._note_step(rank, optimizer)

    def _note_step(self, rank: int, optimizer: Optimizer) -> None:
        """Record a step whose gradients are complete: before the update, or after it if a closure computed them."""
        notes, parameters = self.notes[rank], plain_parameters(optimizer)
        shards, ordinal = sharded_parameters(optimizer), notes.ordinals[optimizer]
        names = tuple(
            notes.names.get(id(p), f"parameter {i}") for i, p in enumerate([*parameters, *shards])
        )
        if self.copies is not None:
            self.copies.note_step(rank, notes.counts[ordinal], parameters, names[: len(parameters)])
        gradients = [plain_gradient(p) for p in parameters]
        local = [*gradients, *map(local_gradient, shards)]
        infinite = next((i for i, g in enumerate(local) if not is_finite(g)), None)
        summed = [g is not None and (g.data_ptr(), g.numel()) in notes.summed for g in gradients]
        if getattr(optimizer, "found_inf", None) is not None:  # GradScaler skips such a step
            infinite = None
        self.steps[ordinal, notes.counts[ordinal]][rank] = Step(
            parameters=parameters,
            names=names,
            gradients=tuple(map(digest, gradients)),
            infinite=infinite,
            summed=tuple(summed),
            varied=tuple(
                done and g is not None and not is_constant(g)
                for done, g in zip(summed, gradients, strict=True)
            ),
            poisoned=notes.poisoned,
            settings=settings_of(optimizer),
            data=tuple(notes.data),
            masks=tuple(notes.masks),
            pending=_owned_by_pending(names, local),
            site=user_line(sys._getframe()),
            habits=self.habits[rank].note_step([*parameters, *shards], local),
        )
        notes.clear()

    @rank_hook
    def _after_step(self, rank: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self.notes[rank].ordinals:
            return
        ordinal = self.notes[rank].ordinals[optimizer]
        key = ordinal, self.notes[rank].counts[ordinal]
        if rank not in self.steps[key]:
            self._note_step(rank, optimizer)
        self.notes[rank].counts[ordinal] += 1
        step = self.steps[key][rank]
        step.values = tuple(map(digest, step.parameters))
        drifted = len(self.steps) > LONGEST_DRIFT
        step.kept = tuple(None if drifted else copy_if_small(p) for p in step.parameters)
        step.done = True
        if len(self.steps[key]) == self.ranks and all(
            note.done for note in self.steps[key].values()
        ):
            self._check_step(key)

    def _check_step(self, key: tuple[int, int]) -> None:
        if key in self.checked:
            return
        self.checked.add(key)
        ordinal, count = key
        complete = {rank: step for rank, step in self.steps[key].items() if step.done}
        before = self.steps.get((ordinal, count - 1))
        starts = self.starts[ordinal]
        for finding in check_step(
            complete, starts, key, before, self.talked, self.parallel, self.compared
        ):
            self._report(finding, count)
        for old in [old for old in self.steps if old[0] == ordinal and old[1] < count]:
            del self.steps[old]

    @rank_hook
    def _before_forward(self, rank: int, module: nn.Module, inputs: Any) -> None:
        notes = self.notes[rank]
        notes.depth += 1
        self.parallel.note_module(module)
        if notes.depth == 1:
            self.habits[rank].evaluating = not module.training
            self.habits[rank].evaluated |= not module.training
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

    def _report(self, finding: TrainingFinding | None, step: int | None = None) -> None:
        """Report a finding, or add its ranks to the one of its kind.

        Args:
            finding: The finding, if there is one.
            step: The number of the step; None for what belongs to none.
        """
        if finding is None or finding.kind in self.ignore:
            return
        earlier = self.reported.get(finding.kind)
        if earlier is not None:
            self._merge(finding, *earlier)
            return
        at = max((s for s, _, _ in self.reported.values()), default=0) + 1 if step is None else step
        follows = finding.follows or next(
            (
                kind
                for kind in LEADS_TO.get(finding.kind, ())
                if kind in self.reported and self.reported[kind][0] < at
            ),
            "",
        )
        finding = replace(finding, follows=follows)
        self.reported[finding.kind] = (at, len(self.findings.found), finding)
        self.findings.note(as_error(finding))
        if self.ends_after is None:
            steps = max(sum(notes.counts.values()) for notes in self.notes)
            self.ends_after = steps + STEPS_AFTER

    def _merge(self, finding: TrainingFinding, at: int, place: int, first: TrainingFinding) -> None:
        """Add ranks that did the same thing later; a difference spreads to other ranks, which are not to blame."""
        more = sorted(set(finding.ranks) - set(first.ranks))
        if not more or finding.kind in LEADS_TO or self.findings.root is not None:
            return
        merged = replace(
            first,
            ranks=tuple(sorted({*first.ranks, *more})),
            text=f"{first.text}; {name_ranks(more)}: {finding.text}",
            sites={**finding.sites, **first.sites},
        )
        self.reported[finding.kind] = (at, place, merged)
        self.findings.found[place] = as_error(merged)

    def not_judged(self) -> dict[str, str]:
        """Return which checks of training could not be made on some ranks, each with the reason."""
        stepped = [rank for rank, notes in enumerate(self.notes) if notes.counts]
        if not stepped:
            return {"training": "no optimizer of torch made a step"}
        found, compared = {}, self.compared
        alone = [rank for rank in stepped if rank not in compared.replicas]
        sharded = [rank for rank in alone if rank in self.shards]
        other = [rank for rank in alone if rank not in self.shards]
        if sharded:
            found["start, gradients and updates"] = (
                f"{name_ranks(sharded)} have shards; probe.same compares what they gather"
            )
        if other and self.ranks > 1:
            reason = f"{name_ranks(other)}: no other rank starts with the same parameters"
            found["start, gradients and updates" + " of others" * bool(sharded)] = reason
        reasons = self._unfed([rank for rank in stepped if rank not in compared.fed])
        if reasons and self.ranks > 1:
            found["data alike"] = "; ".join(reasons)
        if max(max(notes.counts.values(), default=0) for notes in self.notes) < 2:
            found["gradients kept, not updated"] = "one step was made, and these show in the second"
        if not any(max(habits.begun.values(), default=0) > 1 for habits in self.habits):
            found["order repeated"] = "no DistributedSampler that shuffles began a second epoch"
        if not any(habits.evaluated for habits in self.habits):
            found["buffers differ, dropout on"] = "no model was evaluated"
        return found

    def _unfed(self, ranks: Sequence[int]) -> list[str]:
        """Return why the batches of ranks were not compared, in words."""
        one_batch = [rank for rank in ranks if rank in self.compared.one_batch]
        sharing = [rank for rank in ranks if rank in self.compared.sharing - set(one_batch)]
        rest = [rank for rank in ranks if rank not in {*one_batch, *sharing}]
        reasons = []
        if one_batch:
            reasons.append(f"{name_ranks(one_batch)} had one batch at every step")
        if sharing:
            reasons.append(f"{name_ranks(sharing)} exchange activations, and may share a batch")
        if rest:
            reasons.append(f"{name_ranks(rest)} are not known to be data parallel to another rank")
        return reasons


def _owned_by_pending(names: Sequence[str], gradients: Sequence[Tensor | None]) -> str:
    """Describe the first gradient that shares memory with the result of a collective in progress."""
    for work in ranks.current().pending.values():
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and overlap(memory_of([gradient]), work.memory):
                return f"the gradient of {name}, the result of {work.what},"
    return ""
