"""The hooks of `watch`: what is read at the forward, the backward, and before and after the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.guards.live.emitter import Emitter
from isobit.guards.live.gradient_checks import spread_sample
from isobit.guards.live.module_replay import ModelCall, tensors_in
from isobit.guards.live.optimizer_checks import parameters_of
from isobit.guards.live.step_checks import Options, StepChecks
from isobit.guards.live.update_sample import UpdateSample

NOISE = (
    1e-6  # share of the global norm: a bias before a batch norm has a gradient of rounding errors
)
KEPT_VERSIONS = 8  # parameters whose gradients are looked at to see whether they were cleared


class ModelHook:
    """A hook that copies and pickles of a model do not have: an average of weights is not what is trained."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        """Call the watch."""
        self.call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Copy to a hook that does nothing."""
        return idle_hook, ()


def idle_hook() -> Callable[..., None]:
    """Return the hook of a copied model."""
    return do_nothing


def do_nothing(*args: Any) -> None:
    """Take the arguments of any hook."""


class Watch(StepChecks):
    """A watch over a model and its optimizer; `isobit.guards.watch` creates it.

    Attributes:
        findings: What was found, the first 1,000.
        step: The number of the current step.
        steps: Steps that were taken or skipped.
        nonfinite_steps: Steps in which a loss, gradient or weight was not finite, whatever a trainer's log shows.
        skipped_steps: Steps that left the weights as they were.
        norm_steps: Steps whose gradients were all read; in the others a sample was.
        clipped_steps: Those of them whose gradient norm was at `max_norm`.

    Example:
        >>> from isobit.guards import watch
        >>> model = torch.nn.Linear(4, 1)
        >>> guard = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), sinks=[])
        >>> guard.observe(loss=float("inf"))
        >>> guard.findings[0].name, guard.close()
        ('nonfinite-loss', None)
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, emitter: Emitter
    ) -> None:
        super().__init__(model, optimizer, options, emitter)
        self.losses: list[tuple[int, Tensor]] = []
        self.micro_batch = -1
        self.versions: list[tuple[Tensor, int, int]] = []
        # Parameters whose gradients of the last step are still there, and where.
        self.stale: list[tuple[Tensor, int]] = []
        self.sample: UpdateSample | None = None
        self.next_sample = 0
        self.called = self.weights_unread = self.base_unread = False
        self.handles = [
            model.register_forward_pre_hook(ModelHook(self.before_forward), with_kwargs=True),
            model.register_forward_hook(ModelHook(self.after_forward)),
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]
        try:
            self.check_identity()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Watch:
        """Return the watch."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watch; the weights are not read if the run has failed."""
        self.weights_unread = self.weights_unread and error is None
        self.base_unread = self.base_unread and error is None
        self.close()

    def close(self) -> None:
        """Remove the hooks, read the weights a last time, emit the counts, and close the sinks.

        A second call does nothing.
        """
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.course.stop()
        self.samples.stop()
        self.handles, self.call, self.sample, self.versions = [], None, None, []
        self.few = []
        try:
            if self.weights_unread:
                self.step -= 1  # the step that left them so
                self.check_weights()
                self.check_moments()
            if self.base_unread:
                self.check_base()
        finally:
            self.step += self.weights_unread
            self.nonfinite_steps += self.wrong
            for name in ("nonfinite_steps", "skipped_steps", "clipped_steps"):
                self.emitter.metric(name.replace("_", "."), getattr(self, name), step=self.step)
            self.emitter.close()

    def observe(self, loss: Any = None, **metrics: float) -> None:
        """Take the loss, which a loop outside of the model computes, and any other numbers of this step.

        Args:
            loss: A scalar tensor or a number.
            metrics: Numbers that are checked for drift under their names.
        """
        for name, given in {"loss": loss, **metrics}.items():
            if given is not None:
                value = float(given.detach()) if isinstance(given, Tensor) else float(given)
                self.judge(name, value)

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Remember the arguments of a training forward."""
        self.called = True
        if not self.is_replaying:
            self.course.stop()  # of a forward that raised
            self.samples.stop()
        if self.is_training_call(model):
            self.micro_batch += 1
            self.call = ModelCall.of(args, kwargs)
            if self.looks():
                self.course.start()
            if self.samples_blocks():
                self.samples.clear()  # of an earlier micro-batch, or of a step that a scaler left out
                self.samples.start()

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Take the loss from the output, and ask to be called when its backward starts."""
        if not self.is_training_call(model):
            return
        self.course.stop()
        self.samples.stop()
        loss = loss_in(output)
        if loss is not None:
            self.losses.append((self.micro_batch, loss.detach()))
        root = loss if loss is not None else next(graph_tensors(output), None)
        if root is not None and root.requires_grad and (self.versions or self.stale):
            root.register_hook(self.before_backward)  # type: ignore[no-untyped-call]

    def is_training_call(self, model: nn.Module) -> bool:
        """Return whether a call of the model belongs to a training step."""
        return torch.is_grad_enabled() and model.training and not self.is_replaying

    def before_backward(self, grad: Tensor) -> None:
        """Look whether the gradients of the previous step are still there.

        They may be cleared until the step's own backward: that of another model may come first. So what is found at one
        backward is dropped if gradients are cleared at a later one of the same step.
        """
        if self.stale:
            cleared = any(p.grad is None or not p.grad.count_nonzero() for p, _ in self.stale)
            self.stale = [] if cleared else self.stale
            return
        kept, self.versions = self.versions, []
        self.stale = [
            (p, pointer)
            for p, pointer, version in kept
            if p.grad is not None
            and p.grad.data_ptr() == pointer
            and p.grad._version == version
            and bool(p.grad.count_nonzero())
        ]

    def check_cleared(self) -> None:
        """Report gradients of the previous step that this step adds to; once. Those that were replaced are not."""
        added = all(p.grad is not None and p.grad.data_ptr() == at for p, at in self.stale)
        if self.stale and added and "not-zeroed" not in self.reported:
            self.reported.add("not-zeroed")
            self.report(
                "not-zeroed",
                f"the step adds to the gradients of the last one ({len(self.stale)} parameters looked at): "
                "optimizer.zero_grad() is missing",
            )
        self.stale = []

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check losses and gradients; those of a step with a closure after the closure's first call."""
        if self.steps == 0:
            self.check_start()
        closure = next((each for each in (*args, *kwargs.values()) if callable(each)), None)
        if closure is None:
            self.check_step(optimizer)
            return None
        is_checked = False

        def checked() -> Any:
            nonlocal is_checked
            loss = closure()
            if not is_checked:
                is_checked = True
                if not self.losses and isinstance(loss, Tensor) and loss.numel() == 1:
                    self.losses = [(0, loss.detach())]
                self.check_step(optimizer)
            return loss

        put = {id(closure): checked}
        return (
            tuple(put.get(id(each), each) for each in args),
            {name: put.get(id(each), each) for name, each in kwargs.items()},
        )

    @torch.no_grad()
    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check losses and gradients; skip the step if the policy says so."""
        self.check_cleared()
        if self.measures_update():
            self.check_base()
        if self.steps == 0:
            self.check_called()
        for micro_batch, loss in self.losses:
            self.judge("loss", float(loss), micro_batch if self.micro_batch > 0 else None)
        self.losses = []
        self.emit_rates()
        if self.reads_all():
            self.read_all(optimizer)
        if self.agree_to_skip():
            self.skipped_steps += 1
            self.sample = None
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def read_all(self, optimizer: torch.optim.Optimizer) -> None:
        """Check all gradients, and now and then prepare to measure how far the weights move."""
        held = {id(p) for p in parameters_of(optimizer)}
        pairs = [(name, p) for name, p in self.named if id(p) in held and p.requires_grad]
        self.check_gradients([(name, p) for name, p in pairs if p.grad is not None])
        self.few = spread_sample([p for _, p in pairs])
        if self.step % self.options.every == 0:
            for metric, block, value in self.course.metrics():
                self.emitter.metric(metric, value, step=self.step, module=block)
        if self.samples_blocks():
            self.check_blocks()
        if self.steps + 1 == self.options.patience:
            self.check_flow([name for name, _ in pairs])
        if not self.wrong and self.measures_update():
            rates = {id(p): g.get("lr", 1) for g in optimizer.param_groups for p in g["params"]}
            moves = [(name, p, bool(rates[id(p)] > 0)) for name, p in pairs]
            self.sample = UpdateSample(moves, self.next_sample, NOISE * self.total)
            self.next_sample = self.sample.end

    def measures_update(self) -> bool:
        """Return whether this step reads the weights, and how far they move."""
        return self.steps < 2 or self.step % self.options.every == 0

    def check_called(self) -> None:
        """Report a wrapper that is not called before the first step, and a model that is called in evaluation mode."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel) and not self.called:
            self.report(
                "wrapper-bypassed",
                "the step follows no call of DistributedDataParallel: the module inside was called, and the gradients "
                "are not reduced over ranks",
            )
        elif self.called and not self.model.training and depends_on_mode(self.model):
            self.report(
                "eval-mode",
                "the model is in evaluation mode at its first step: dropout is off, and batch norms use their "
                "running statistics. model.train() is missing, unless that is meant; the loss in the model's output "
                "and the module where numbers stop being finite are not seen",
                severity="warning",
            )

    def agree_to_skip(self) -> bool:
        """Return whether to skip; the ranks of `group` decide together."""
        if self.options.group is None or self.options.policy in ("log", "raise"):
            return self.wants_skip
        flag = torch.tensor(float(self.wants_skip), device=self.named[0][1].device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.options.group)
        return bool(flag)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check the weights, and prepare for the next step."""
        sample, self.sample = self.sample, None
        self.weights_unread = not (self.wrong or self.measures_update())
        self.base_unread = True
        if not self.weights_unread:
            self.check_weights()
            self.check_moments()
        if sample is not None:
            self.check_update(*sample.compare())
        self.check_replicas()
        looks = self.steps < self.options.patience or self.step % self.options.gradients_every == 0
        self.versions = list(islice(gradient_versions(optimizer), KEPT_VERSIONS)) if looks else []
        self.nonfinite_steps += self.wrong
        self.steps, self.step, self.micro_batch = self.steps + 1, self.step + 1, -1
        self.wrong = self.wants_skip = self.alarmed = False
        self.course.sizes = {}
        self.call = None


def depends_on_mode(model: nn.Module) -> bool:
    """Return whether a module computes something else in evaluation mode: a dropout, or a norm of batches."""
    return any(
        getattr(module, "p", 0) > 0
        if isinstance(module, nn.modules.dropout._DropoutNd)
        else isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        for module in model.modules()
    )


def gradient_versions(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, int, int]]:
    """Yield parameters with the address and version of their dense gradients."""
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided:
            yield parameter, grad.data_ptr(), grad._version


def loss_in(output: Any) -> Tensor | None:
    """Return the loss of a model's output: `.loss`, ["loss"], or a scalar that needs a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, Tensor) and output.ndim == 0:
        loss = output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def graph_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output that are part of a graph."""
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad)
