"""`watch`: check every step of a training run, by hooks on the model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import ArgumentError
from isobit.foundation.renaming import warn_renamed
from isobit.guards.live.emitter import Emitter
from isobit.guards.live.events import Event
from isobit.guards.live.module_replay import ModelCall, tensors_in
from isobit.guards.live.optimizer_checks import (
    UpdateSample,
    parameters_of,
    spread_sample,
    unwrapped_optimizer,
)
from isobit.guards.live.step_checks import POLICIES, Options, StepChecks
from isobit.parallel.tensor.shard import find_shards, is_dtensor

# The arguments of `watch` that belong together: how often it looks, where a run resumes, which ranks are replicas.


@dataclass(frozen=True)
class Intervals:
    """How often a watch looks, in steps.

    Attributes:
        weights: Steps between looks at the weights, at the optimizer's state and at how far weights move, and between
            metrics of blocks.
        gradients: Steps between looks at all gradients, after the first `patience` steps; between them, 4,096 elements
            of 4 gradients are read. None is 4, or 1 with a policy that raises or skips.
        metrics: Steps between metrics of the loss, the gradient norm (of steps that read all gradients) and the
            learning rates.
        patience: Steps after which a parameter that never had a gradient, or only zeros, is reported.
        blocks: Steps between samples of blocks, with `watch(blocks=True)`; the first two steps are sampled too.

    Example:
        >>> isobit.guards.Intervals(gradients=1).weights
        100
    """

    weights: int = 100
    gradients: int | None = None
    metrics: int = 1
    patience: int = 10
    blocks: int = 20


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from.

    Attributes:
        first_step: The number of the first step.
        digest: What `state_digest` returned when the checkpoint was saved.
        weights: Tensors of a checkpoint by name: those that the model has must have the same bits before the first
            step.

    Example:
        >>> isobit.guards.Resume(first_step=500).digest is None
        True
    """

    first_step: int = 0
    digest: str | None = None
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Replicas:
    """The ranks whose parameters must be equal. Every rank of the groups must watch.

    Attributes:
        every: Steps between comparisons of parameters over `group` and `tensor_group`; None compares nothing.
        group: Ranks that have equal parameters, and that skip a step together under a policy that skips: with sharded
            parameters, all ranks. Without it, ranks do not skip for a loss that diverges, which is one rank's own.
        tensor_group: The ranks of a tensor-parallel group: what `replicated_tensors` returns is compared there.
        sharded: Patterns of names that are sharded by hand, for `replicated_tensors`.

    Example:
        >>> isobit.guards.Replicas(every=100).group is None
        True
    """

    every: int | None = None
    group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    sharded: Iterable[str] = ()


# keyword of the last release -> argument and field
RENAMED = {
    "every": ("intervals", "weights"),
    "gradients_every": ("intervals", "gradients"),
    "metrics_every": ("intervals", "metrics"),
    "patience": ("intervals", "patience"),
    "first_step": ("resume", "first_step"),
    "resumed_from": ("resume", "digest"),
    "weights_from": ("resume", "weights"),
    "agree_every": ("replicas", "every"),
    "group": ("replicas", "group"),
    "tensor_group": ("replicas", "tensor_group"),
    "sharded": ("replicas", "sharded"),
}


def with_old_keywords(groups: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the groups with the values of keywords of the last release, each with a DeprecationWarning.

    Raises:
        ArgumentError: If a group is of another type.
        TypeError: If a keyword is unknown, as for any function.
    """
    kinds = {"intervals": Intervals, "resume": Resume, "replicas": Replicas}
    found: dict[str, Any] = dict(groups)
    for name, kind in kinds.items():
        if not isinstance(found[name], kind):
            raise ArgumentError(
                expected=f"{name}=isobit.guards.{kind.__name__}(...)",
                received=f"{type(found[name]).__name__} {found[name]!r}"[:80],
                remedy=f"from isobit.guards import {kind.__name__}",
            )
    for keyword, value in old.items():
        if keyword not in RENAMED:
            raise TypeError(f"watch() got an unexpected keyword argument {keyword!r}")
        group, field = RENAMED[keyword]
        warn_renamed(f"{keyword}=", f"{group}={kinds[group].__name__}({field}=)", "watch", level=4)
        found[group] = replace(found[group], **{field: value})
    return found


# The hooks of `watch`: what is read at the forward, the backward, and before and after the optimizer's step.

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
            rates = {id(p): g.get("lr") for g in optimizer.param_groups for p in g["params"]}
            # Where a group has None, the optimizer computes a rate itself, as Adafactor does.
            still = {key for key, rate in rates.items() if rate is not None and not rate > 0}
            moves = [(name, p, id(p) not in still) for name, p in pairs]
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


Policy = str | Callable[[Event], object]


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    policy: Policy = "log",
    sinks: Iterable[Any] | None = None,
    run: str = "",
    max_norm: float | None = None,
    config: Mapping[str, Any] | None = None,
    other_optimizers: Iterable[Any] = (),
    blocks: bool = False,
    intervals: Intervals = Intervals(),  # noqa: B008
    resume: Resume = Resume(),  # noqa: B008
    replicas: Replicas = Replicas(),  # noqa: B008
    **old: Any,
) -> Watch:
    """Check every step of a training run. See docs/how-to/watch-a-run.md for what is checked.

    Args:
        model: The model that the training loop calls.
        optimizer: The optimizer whose `step` updates it, also one that Accelerate has wrapped.
        policy: What to do with a finding of severity "error", besides sending it to the sinks: "log" does nothing,
            "raise" raises GuardError, "skip" leaves the weights as they are in this step; a function is called with the
            finding, and skips the step if it returns "skip". A step can be skipped only for what is found before it.
        sinks: Where events go, as for `Emitter`; None is the logger `isobit.guards`.
        run: The name of the run.
        max_norm: The limit of the global gradient norm after clipping.
        config: The configuration of the run, such as a YAML file as it was read: the hyperparameters that it has must
            be those of every group of this optimizer; a weight decay of 0 is allowed.
        other_optimizers: Those that train the rest of the model, each with a watch of its own.
        blocks: Sample every block's input, output and gradient now and then (`Intervals(blocks=)`), to name a block
            that computes something wrong, or whose numbers are far larger or smaller than its neighbours'.
        intervals: How often it looks at weights and gradients, and sends metrics.
        resume: The checkpoint that the run continues from.
        replicas: The ranks whose parameters must be equal.
        old: Keywords of the last release, which are now fields of the three above; each gives a DeprecationWarning.

    Returns:
        The watch, which ends with `close()` or the end of a `with` block.

    Raises:
        ArgumentError: If an argument is not supported.
        GuardError: With the policy "raise", for a finding.

    Example:
        >>> from isobit.guards import watch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with watch(model, optimizer, policy="skip", sinks=[]) as guard:
        ...     for step in range(3):
        ...         x = torch.full((2, 4), float("nan") if step == 1 else 1.0)
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        >>> print(guard.findings[0])
        step 1, rank 0: nonfinite-gradient: bias: 1 of 1 elements are not finite, first at [0]: nan; 2 of 2 gradients in
        all; the input of the model is not finite
        >>> guard.steps, guard.nonfinite_steps, guard.skipped_steps
        (3, 1, 1)
    """
    if not (callable(policy) or policy in POLICIES):
        raise ArgumentError(
            expected=f"a policy of {POLICIES}, or a function",
            received=repr(policy),
            remedy="choose one of these",
        )
    groups = {"intervals": intervals, "resume": resume, "replicas": replicas}
    given = with_old_keywords(groups, old)
    intervals, resume, replicas = given["intervals"], given["resume"], given["replicas"]
    looks = intervals.gradients
    if looks is None:
        looks = 4 if policy == "log" else 1
    check_counts(max_norm, replace(intervals, gradients=looks), replicas.every)
    is_sharded = bool(find_shards(model)) or any(map(is_dtensor, model.parameters()))
    if is_sharded and replicas.group is None and policy not in ("log", "raise"):
        raise ArgumentError(
            expected="a group of ranks that skip a step together",
            received="a model with sharded parameters, a policy that may skip, and no group",
            remedy="pass replicas=Replicas(group=torch.distributed.group.WORLD), or policy='raise'",
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    options = Options(
        policy=policy,
        max_norm=max_norm,
        every=intervals.weights,
        patience=intervals.patience,
        first_step=resume.first_step,
        resumed_from=resume.digest,
        agree_every=replicas.every,
        group=replicas.group,
        tensor_group=replicas.tensor_group,
        sharded=tuple(replicas.sharded),
        is_sharded=is_sharded,
        gradients_every=looks,
        weights_from=resume.weights,
        other_optimizers=tuple(map(unwrapped_optimizer, other_optimizers)),
        metrics_every=intervals.metrics,
        config=config,
        blocks_every=intervals.blocks if blocks else None,
    )
    emitter = Emitter(sinks, run=run, rank=rank)
    return Watch(model, unwrapped_optimizer(optimizer), options, emitter)


def check_counts(max_norm: float | None, intervals: Intervals, agree: int | None) -> None:
    """Raise ArgumentError if a number of steps, or the limit of the norm, is not positive."""
    numbers = {f"Intervals({name}={number})": number for name, number in vars(intervals).items()}
    if agree is not None:
        numbers[f"Replicas(every={agree})"] = agree
    wrong = [name for name, number in numbers.items() if number < 1]
    wrong += [f"max_norm={max_norm}"] if max_norm is not None and not max_norm > 0 else []
    if wrong:
        raise ArgumentError(
            expected="fields of Intervals and every of Replicas of at least 1, and a positive max_norm",
            received=", ".join(wrong),
            remedy="leave out what should not be checked",
        )
