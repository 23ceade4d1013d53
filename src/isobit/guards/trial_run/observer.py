"""Observe the first optimizer steps of a program: its models, optimizers, losses, batches and files."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from isobit import bits
from isobit.guards.live.emitter import Emitter
from isobit.guards.live.module_replay import ModelCall, tensors_in, unwrapped
from isobit.guards.live.optimizer_checks import parameters_of
from isobit.guards.live.step_checks import Options
from isobit.guards.live.watching import Watch
from isobit.guards.trial_run.counts import Counts
from isobit.guards.trial_run.dtype_census import DtypeCensus
from isobit.guards.trial_run.first_forward import FirstForward
from isobit.guards.trial_run.generation import Generations
from isobit.guards.trial_run.hyperparameters import Optimizers, Schedules
from isobit.guards.trial_run.loaders import Loaders
from isobit.guards.trial_run.losses import LossCalls
from isobit.guards.trial_run.saved_files import SavedFiles, can_digest, readable_tensors
from isobit.guards.trial_run.step_order import StepOrder, rate_of
from isobit.guards.trial_run.training_mode import EvalCall

LARGEST = 2**24  # elements of a tensor whose digest is taken
MOST_EVAL_CALLS = 64  # of a step that are kept until it is known whether they belong to training
IGNORED = -100  # the label that torch's losses and all trainers leave out


class StepsDone(BaseException):
    """Ends the program after the last step; not an Exception, so that programs do not catch it."""


class StepWatch(Watch):
    """A watch that leaves the comparison of parameters to the end, when all optimizers are known.

    Attributes:
        trains_in_eval: Whether calls of the model in eval mode belong to training.
    """

    trains_in_eval = False

    def check_identity(self) -> None:
        """Compare nothing yet."""

    def is_training_call(self, model: nn.Module) -> bool:
        """Return whether a call of the model belongs to a training step."""
        is_training = model.training or self.trains_in_eval
        return torch.is_grad_enabled() and is_training and not self.is_replaying

    def is_spread(self) -> bool:
        """Return whether parameters are sharded: a forward needs every rank, and leaves other tensors in the model."""
        return not all(map(can_digest, self.model.parameters()))

    def replay(self) -> str:
        """Return where the forward stops being finite, in words; nothing if other ranks had to run it too."""
        return "" if self.is_spread() else super().replay()

    def without_hooks(self, search: Callable[..., Any], *args: Any) -> Any:
        """Search in a replay of the last call."""
        if self.is_spread():
            return "the model is sharded, so that its forward is not repeated"
        return super().without_hooks(search, *args)


def digests_in(value: Any) -> tuple[str, ...]:
    """Return the digests of the tensors in a value that are not large."""
    small = [t for t in readable_tensors(value) if t.numel() <= LARGEST]
    return tuple(bits.digest(tensor.detach().cpu()) for tensor in small)


class Observer:
    """Global hooks on every module and optimizer, from `install` to `remove`.

    Attributes:
        roots: Models that the program called itself, in training, with their last call.
        in_eval: Those of them, by id, that were trained in eval mode only.
        empty: Steps in which a model was called with labels of which none counts.
        has_closures: Whether a step was given a function that computes the loss.
        watches: A watch per optimizer.
        batches: Per step of the first optimizer, the digests of what models were called with.
        before: Digests of all parameters before the first step.
        rows: Per step, the samples of what models were called with, per call; 0 if they are not known.
        rates: The learning rate of the first optimizer's first group, per step.
        shapes: By model, the shapes of its inputs and of its first output, in its first call.
        is_over: Whether the last step was taken; a program that catches its end is ended at every further step.
        thread: The only thread whose calls count; None for every thread.
    """

    def __init__(
        self, steps: int, max_norm: float | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        self.steps, self.max_norm, self.depth = steps, max_norm, 0
        self.config = config or {}
        self.is_open = self.is_over = False
        self.thread: int | None = None
        self.roots: dict[int, tuple[nn.Module, ModelCall]] = {}
        self.in_eval: set[int] = set()
        self.empty: set[int] = set()
        self.has_closures = False
        # Since the last step; an evaluation without no_grad may have any number.
        self.eval_calls: deque[EvalCall] = deque(maxlen=MOST_EVAL_CALLS)
        self.watches: dict[int, StepWatch] = {}
        self.batches: list[tuple[str, ...]] = [()]
        self.evaluated: set[str] = (
            set()
        )  # digests of what models were called with without gradients
        self.given: set[weakref.ref[Tensor]] = set()  # the first input of each call
        self.before: dict[int, str] = {}
        self.rows: list[list[int]] = [[]]
        self.callers: list[list[int]] = [[]]  # the models that the rows were given to, by id
        self.rates: list[float] = []
        self.shapes: dict[int, tuple[nn.Module, list[torch.Size], torch.Size | None]] = {}
        self.pending: ModelCall | None = None
        self.stack = ExitStack()
        self.losses = LossCalls(self.is_mine, lambda: len(self.batches) - 1)
        self.loaders, self.census = Loaders(self.is_mine), DtypeCensus()
        self.created, self.generated = Optimizers(self.is_mine), Generations(self.is_mine)
        self.order, self.schedules = StepOrder(self.is_mine), Schedules(self.is_mine)
        self.first = FirstForward()
        self.files = SavedFiles(self.is_mine, lambda: [model for model, _ in self.roots.values()])

    def is_mine(self) -> bool:
        """Return whether this thread is the program's, and its steps are not over; not while a model is compiled."""
        return self.is_open and not torch.compiler.is_compiling() and self.is_my_thread()

    def is_my_thread(self) -> bool:
        """Return whether this thread is the program's."""
        return self.thread is None or self.thread == threading.get_ident()

    def install(self) -> None:
        """Add the hooks, and replace what has none."""
        for recorder in (
            self.losses,
            self.loaders,
            self.files,
            self.created,
            self.generated,
            self.order,
            self.schedules,
        ):
            self.stack.enter_context(recorder.recording())
        for handle in (
            modules.register_module_forward_pre_hook(self.before_call),
            modules.register_module_forward_hook(
                self.after_call, with_kwargs=True, always_call=True
            ),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ):
            self.stack.callback(handle.remove)
            # torch 2.13 keeps this entry of a removed hook, and torch.compile warns of it.
            self.stack.callback(modules._global_forward_hooks_with_kwargs.pop, handle.id, None)
        self.is_open = True

    def finish(self) -> None:
        """End the watches; what the program does from now on does not count."""
        self.is_open = False
        for watch in self.watches.values():
            watch.close()

    def remove(self) -> None:
        """Remove the hooks, and end the watches."""
        self.finish()
        self.stack.close()

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Note the state of the generators before a call of the program's own."""
        if not self.is_mine():
            return
        if self.depth == 0:
            self.generated.follow(module)
            self.pending = ModelCall.of((), {})
            if is_training_call(module):
                self.first.before_training(module)
        self.depth += 1

    def after_call(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note a training call of a model that has parameters to train.

        `rest` is keyword arguments and output. If the forward raises, as the recomputation of a checkpoint does to end
        early, torch passes no keyword arguments.
        """
        if not self.is_mine():
            return
        self.depth -= 1
        is_recomputed = torch._C._current_graph_task_id() != -1  # inside of a backward
        if not (self.depth or is_recomputed or torch.is_grad_enabled()):
            self.evaluated.update(digests_in((args, rest[:-1])))
        if not (self.depth or is_recomputed or module.training):
            self.note_evaluation(module, args, *rest)
        is_training = is_training_call(module)
        if is_recomputed or not torch.is_grad_enabled():
            return
        if is_training:
            self.census.note(module, rest[-1])
        kwargs = rest[0] if len(rest) == 2 else {}
        has_parameters = any(True for _ in module.parameters())
        if self.depth or self.pending is None or not has_parameters:
            return
        call = replace(self.pending, args=args, kwargs=kwargs)
        given = list(tensors_in((args, kwargs)))
        if not is_training:
            self.note_eval_call(EvalCall(module, call, given, first_shape(rest[-1])), rest[-1])
            return
        self.in_eval.discard(id(module))
        self.note_training(module, call, given, first_shape(rest[-1]))
        with self.not_observing():
            self.first.after_training(module, call)
        self.census.asked.update(call.autocast)

    def note_training(
        self,
        module: nn.Module,
        call: ModelCall,
        given: list[Tensor],
        returned: torch.Size | None,
    ) -> None:
        """Note a call of a model that belongs to training."""
        self.roots[id(module)] = (module, call)
        if has_no_target(call.kwargs.get("labels")):
            self.empty.add(len(self.batches) - 1)
        self.note_shapes(module, given, returned)
        self.batches[-1] += digests_in(given)
        self.given.update(weakref.ref(tensor) for tensor in given[:1])

    def note_eval_call(self, call: EvalCall, output: Any) -> None:
        """Keep a call in eval mode until the next step, which shows whether it belongs to training."""
        outputs = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        for tensor in outputs:
            tensor.register_hook(call.note_backward)  # type: ignore[no-untyped-call]
        if outputs:
            self.eval_calls.append(call)

    def note_eval_training(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the calls in eval mode whose backward gave this optimizer's parameters a gradient as training."""
        held = {id(p) for p in parameters_of(optimizer)}
        reached = [each for each in self.eval_calls if each.was_reached]
        for each in reached:
            if held.isdisjoint(id(p) for p in each.model.parameters()):
                continue
            if id(each.model) not in self.roots:
                self.in_eval.add(id(each.model))
            if id(each.model) in self.in_eval:
                self.note_training(each.model, each.call, each.given, each.returned)
        self.eval_calls.clear()

    def note_evaluation(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Note a call in eval mode of a model that has not been trained yet."""
        if self.pending is None or len(rest) != 2 or id(module) in self.roots:
            return
        if any(True for _ in module.parameters()):
            call = replace(self.pending, args=args, kwargs=rest[0])
            self.first.note_evaluation(module, call, rest[1])

    @contextmanager
    def not_observing(self) -> Iterator[None]:
        """Let calls of a model, that are not the program's, pass unseen."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True

    def note_shapes(
        self, module: nn.Module, given: list[Tensor], returned: torch.Size | None
    ) -> None:
        """Note the rows of a call, and the shapes of the first."""
        shapes = [tensor.shape for tensor in given if tensor.ndim]
        self.shapes.setdefault(id(module), (unwrapped(module), shapes, returned))
        axis = batch_axis(module)
        self.callers[-1].append(id(module))
        self.rows[-1].append(shapes[0][axis] if shapes and len(shapes[0]) > max(axis, 1) else 0)

    def model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model that an optimizer trains: the one called that shares most parameters with it."""
        held = {id(p) for p in parameters_of(optimizer)}
        models = [unwrapped(model) for model, _ in self.roots.values()]
        shared = {
            at: sum(id(p) in held for p in model.parameters()) for at, model in enumerate(models)
        }
        best = max(shared, key=lambda at: shared[at], default=None)
        if best is None:
            return nn.Module()
        covering = [at for at in shared if shared[at]]
        return models[best] if len(covering) <= 1 else nn.ModuleList(models[at] for at in covering)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Start a watch at the first step of an optimizer; its own hook runs next."""
        if self.is_over and self.is_my_thread():
            raise StepsDone  # again: the program has caught it
        if not self.is_mine():
            return
        self.note_eval_training(optimizer)
        self.has_closures |= any(callable(each) for each in (*args, *kwargs.values()))
        self.order.before_step(optimizer)
        if self.is_first(optimizer):
            self.rates.append(rate_of(optimizer.param_groups[0]))
        losses, self.losses.roots = self.losses.roots, []
        if id(optimizer) in self.watches:
            self.give_losses(self.watches[id(optimizer)], losses)
            return
        if not self.before:
            self.before = {
                id(p): bits.digest(p.detach())
                for model, _ in self.roots.values()
                for p in model.parameters()
                if can_digest(p)
            }
        options = Options("log", self.max_norm, 1, self.steps, 0, None, None, None, None, (), False)
        watch = StepWatch(self.model_of(optimizer), optimizer, options, Emitter([]))
        watch.call = next(
            (call for m, call in self.roots.values() if unwrapped(m) is watch.model), None
        )
        watch.trains_in_eval = any(
            unwrapped(self.roots[key][0]) is watch.model for key in self.in_eval
        )
        self.watches[id(optimizer)] = watch
        self.created.steps[optimizer] = 0
        self.give_losses(watch, losses)

    def give_losses(self, watch: StepWatch, losses: list[Tensor]) -> None:
        """Let a watch judge what `backward` was called on, unless the model returned its loss itself."""
        if not watch.losses:
            watch.losses = list(enumerate(losses))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped, in the order of their first steps."""
        return list(self.created.steps)

    def is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the one whose steps are those of the run."""
        return next(iter(self.created.steps), optimizer) is optimizer

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step, and end the program after the last."""
        if not self.is_mine() or id(optimizer) not in self.watches:
            return
        self.created.steps[optimizer] += 1
        self.note_eval_training(optimizer)  # of a function that the step has called
        self.order.after_step(optimizer)
        if self.created.are_done(self.steps):
            self.is_over = True
            self.finish()
            raise StepsDone
        if not self.is_first(optimizer):
            return
        self.loaders.note_step()
        self.batches.append(())
        self.rows.append([])
        self.callers.append([])

    def is_one_object(self) -> bool:
        """Return whether every call of a model was given one and the same tensor first."""
        tensors = [each() for each in self.given]
        return len(tensors) == 1 and tensors[0] is not None

    def counts(self) -> Counts:
        """Return what the steps consumed; of a model in parts that are called one after another, what each did."""
        taken = next(iter(self.created.steps.values()), 0)
        steps = [
            [
                [r for r, caller in zip(rows, callers, strict=True) if caller == key]
                for key in self.roots
            ]
            for rows, callers in zip(self.rows[:taken], self.callers[:taken], strict=True)
        ]
        is_one = bool(steps and self.roots) and all(
            part == step[0] for step in steps for part in step
        )
        firsts = [step[0] for step in steps] if is_one else []
        rows = {count for step in firsts for count in step}
        calls = {len(step) for step in firsts}
        # One row may be many samples in a line, as padding-free trainers send them.
        is_plain = is_one and len(calls) == 1 and not rows & {0, 1}
        sizes = [sized(loader.dataset) for loader, _ in self.loaders.epochs.values()]
        models = [model for model, _ in self.roots.values()]
        return Counts(
            rows=rows.pop() if is_plain and len(rows) == 1 else None,
            accumulation=calls.pop() if is_plain else None,
            per_step=sum(firsts[0]) if is_plain else None,
            sequences=sizes[0] if len(sizes) == 1 else None,
            parameters=sum(p.numel() for model in models for p in model.parameters()),
        )

    def peak(self, steps: int) -> tuple[str, float]:
        """Return the class and the largest rate of the program's schedule in a run of this length."""
        first = next(iter(self.order.rates))
        return self.schedules.peak(first, self.order.rates[first], steps)


def is_training_call(module: nn.Module) -> bool:
    """Return whether a call of a module belongs to training."""
    return torch.is_grad_enabled() and module.training


def first_shape(output: Any) -> torch.Size | None:
    """Return the shape of the first tensor of an output that has one."""
    return next((t.shape for t in tensors_in(output) if t.ndim), None)


def has_no_target(labels: Any) -> bool:
    """Return whether labels are those of a language model, and every one of them is ignored."""
    is_plain = isinstance(labels, Tensor) and can_digest(labels) and not labels.is_floating_point()
    return is_plain and bool(labels.numel()) and bool((labels == IGNORED).all())


def sized(dataset: Any) -> int | None:
    """Return the length of a dataset, if it has one."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def batch_axis(model: nn.Module) -> int:
    """Return the dimension of samples: 1 if a part of the model has `batch_first=False`, else 0."""
    return int(any(getattr(module, "batch_first", True) is False for module in model.modules()))
