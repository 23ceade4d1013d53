"""The hooks of `watch`: what is read at the forward, the backward, and before and after the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.guards.emitter import Emitter
from isobit.guards.module_replay import ModelCall, tensors_in
from isobit.guards.optimizer_checks import parameters_of
from isobit.guards.step_checks import Options, StepChecks
from isobit.guards.update_sample import UpdateSample

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
        clipped_steps: Steps whose gradient norm was at `max_norm`.

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
        self.stale: list[Tensor] = []  # parameters whose gradients of the last step are still there
        self.sample: UpdateSample | None = None
        self.next_sample = 0
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
        """End the watch."""
        self.close()

    def close(self) -> None:
        """Remove the hooks, emit the counts, and close the sinks. A second call does nothing."""
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles, self.call, self.sample, self.versions = [], None, None, []
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
        if self.is_training_call(model):
            self.micro_batch += 1
            self.call = ModelCall.of(args, kwargs)

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Take the loss from the output, and ask to be called when its backward starts."""
        if not self.is_training_call(model):
            return
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
            left = [p for p in self.stale if p.grad is not None and bool(p.grad.count_nonzero())]
            self.stale = left if len(left) == len(self.stale) else []
            return
        kept, self.versions = self.versions, []
        self.stale = [
            p
            for p, pointer, version in kept
            if p.grad is not None
            and p.grad.data_ptr() == pointer
            and p.grad._version == version
            and bool(p.grad.count_nonzero())
        ]

    def check_cleared(self) -> None:
        """Report gradients of the previous step that this step adds to; once."""
        if self.stale and "not-zeroed" not in self.reported:
            self.reported.add("not-zeroed")
            self.report(
                "not-zeroed",
                f"the step adds to the gradients of the last one ({len(self.stale)} parameters looked at): "
                "optimizer.zero_grad() is missing",
            )
        self.stale = []

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check losses and gradients; skip the step if the policy says so."""
        if self.steps == 0:
            self.check_start()
        self.check_cleared()
        for micro_batch, loss in self.losses:
            self.judge("loss", float(loss), micro_batch if self.micro_batch else None)
        self.losses = []
        held = {id(p) for p in parameters_of(optimizer)}
        pairs = [(name, p) for name, p in self.named if id(p) in held and p.requires_grad]
        self.check_gradients([(name, p) for name, p in pairs if p.grad is not None])
        if self.steps + 1 == self.options.patience:
            self.check_flow([name for name, _ in pairs])
        if self.agree_to_skip():
            self.skipped_steps += 1
            for parameter in parameters_of(optimizer):
                parameter.grad = None
        elif not self.wrong and (self.steps < 2 or self.step % self.options.every == 0):
            rates = {id(p): g.get("lr", 1) for g in optimizer.param_groups for p in g["params"]}
            moves = [(name, p, bool(rates[id(p)] > 0)) for name, p in pairs]
            self.sample = UpdateSample(moves, self.next_sample, NOISE * self.total)
            self.next_sample = self.sample.end

    def agree_to_skip(self) -> bool:
        """Return whether to skip; ranks with shards of one model decide together."""
        if not self.options.is_sharded or self.options.policy in ("log", "raise"):
            return self.wants_skip
        flag = torch.tensor(float(self.wants_skip), device=self.named[0][1].device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.options.group)
        return bool(flag)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check the weights, and prepare for the next step."""
        sample, self.sample = self.sample, None
        self.check_weights()
        if sample is not None:
            self.check_update(*sample.compare())
        self.check_replicas()
        given = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        dense = [(p, grad) for p, grad in given if grad.layout == torch.strided]
        self.versions = [(p, g.data_ptr(), g._version) for p, g in dense[:KEPT_VERSIONS]]
        self.nonfinite_steps += self.wrong
        self.steps, self.step, self.micro_batch = self.steps + 1, self.step + 1, -1
        self.wrong = self.wants_skip = False
        self.call = None


def loss_in(output: Any) -> Tensor | None:
    """Return the loss of a model's output: `.loss`, ["loss"], or a scalar that needs a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, Tensor) and output.ndim == 0:
        loss = output
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def graph_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output that are part of a graph."""
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad)
