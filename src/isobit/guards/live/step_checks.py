"""The checks of `watch`: of the optimizer before the first step, and of losses, gradients and weights in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import ArgumentError, GuardError
from isobit.guards.live.adapter_base import AdapterBase
from isobit.guards.live.agreement import rank_agreement, replicated_tensors
from isobit.guards.live.blocks import MOST_BLOCKS, BlockCourse, BlockSamples
from isobit.guards.live.drift import RECENT, Drift
from isobit.guards.live.emitter import Emitter
from isobit.guards.live.events import Event
from isobit.guards.live.module_replay import (
    ModelCall,
    find_cancelled,
    find_end_of_graph,
    find_nonfinite,
)
from isobit.guards.live.optimizer_checks import (
    check_identity,
    check_running_state,
    check_state,
    describe_nonfinite,
    is_sample_finite,
    local_part,
    name_some,
    nonfinite_places,
    norms_of,
    parameters_of,
    state_digest,
    total_of,
    weights_that_differ,
    wide_norms_of,
)
from isobit.guards.live.start_checks import check_reduced
from isobit.guards.trial_run.hyperparameters import check_hyperparameters, expected_values

POLICIES = ("log", "raise", "skip")
MOST_FINDINGS = 1000  # that are kept; sinks receive all
MOST_REPLAYS = 3
ZERO_RATES = 20  # steps in a row whose rate is zero are reported
ACTED_ON = ("loss", "grad.norm")  # curves whose divergence is an error; a reward may well rise
ABOVE_LIMIT = 1.01  # a clipped gradient of 16 bits is rounded once per element


@dataclass(frozen=True)
class Options:
    """The arguments of `watch`."""

    policy: Any
    max_norm: float | None
    every: int
    patience: int
    first_step: int
    resumed_from: str | None
    agree_every: int | None
    group: dist.ProcessGroup | None
    tensor_group: dist.ProcessGroup | None
    sharded: tuple[str, ...]
    is_sharded: bool
    gradients_every: int = 1
    weights_from: Mapping[str, Tensor] | None = None
    other_optimizers: tuple[torch.optim.Optimizer, ...] = ()
    metrics_every: int = 1
    config: Mapping[str, Any] | None = None
    blocks_every: int | None = None


class StepChecks:
    """What a watch knows of its run, and the checks."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, emitter: Emitter
    ) -> None:
        self.model, self.optimizer, self.options, self.emitter = model, optimizer, options, emitter
        self.findings: list[Event] = []
        self.step = options.first_step
        self.steps = self.nonfinite_steps = self.skipped_steps = self.clipped_steps = 0
        self.norm_steps = 0
        self.named = list(model.named_parameters())
        self.drift = {"loss": Drift(), "grad.norm": Drift(log=True)}
        self.call: ModelCall | None = None
        self.course = BlockCourse(model)
        if options.blocks_every is not None and not self.course.blocks:
            raise ArgumentError(
                expected=f"blocks=True with a model of 2 to {MOST_BLOCKS} blocks: entries of its lists of modules",
                received=f"{type(model).__name__} without such blocks, or with more",
                remedy="leave blocks out: losses, gradients and weights are checked in any model",
            )
        self.samples = BlockSamples(self.course.blocks)
        self.base = AdapterBase(model)
        self.replays, self.looks_again, self.is_replaying = 0, 0, False
        self.flowing: set[str] = set()  # parameters that have had a gradient other than zero
        self.wrong = self.wants_skip = False  # in this step
        self.alarmed = False  # in this step: it then reads all gradients
        self.total = 0.0  # the gradient norm of this step
        self.reported: set[str] = set()  # what is reported once
        self.zero_rates = self.zero_since = 0  # how many rates of zero in a row, and the first step
        self.few: list[Tensor] = []  # parameters whose gradients are looked at in every step

    def report(self, rule: str, message: str, *, severity: str = "error", **where: Any) -> None:
        """Send a finding to the sinks, and follow the policy if it is an error."""
        event = self.emitter.finding(rule, message, severity=severity, step=self.step, **where)
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(event)
        if severity != "error":
            return
        policy = self.options.policy
        if policy == "raise":
            error = GuardError(
                expected="a training step that breaks no rule of isobit.guards.watch",
                received=str(event),
                remedy="look at the module that is named; policy='log' continues",
            )
            error.event = event
            raise error
        wants = policy == "skip" or (callable(policy) and policy(event) == "skip")
        # Every rank has a loss of its own: one that skips alone would leave its replicas behind.
        if wants and not (
            rule == "divergence-loss" and self.options.group is None and is_one_of_many()
        ):
            self.wants_skip = True

    def judge(self, name: str, value: float, micro_batch: int | None = None) -> None:
        """Check a number of the run for drift, and emit it now and then."""
        reading = self.drift.setdefault(name, Drift()).add(value)
        where: dict[str, Any] = {"value": value, "micro_batch": micro_batch}
        if reading.status == "nonfinite":
            self.wrong = True
            if name == "loss":
                self.report("nonfinite-loss", f"the loss is {value}{self.replay()}", **where)
            elif name != "grad.norm":  # whose gradients are named
                self.report(f"nonfinite-{name}", f"{name} is {value}", **where)
        elif reading.is_alarm:
            self.alarmed = True
            against = (
                f"the median of the last {RECENT} values is {reading.score:.6g}"
                if reading.status == "divergence"
                else f"score {reading.score:.1f} against the last 128 values"
            )
            block, why = self.origin()
            self.report(
                f"{reading.status}-{name}",
                f"{name} is {value:.6g}; {against}, exponential mean {reading.mean:.6g}{why}",
                severity=reading.severity if name in ACTED_ON else "warning",
                module=block,
                **where,
            )
        if reading.is_alarm or self.step % self.options.metrics_every == 0:
            self.emitter.metric(name, value, step=self.step, micro_batch=micro_batch)

    def emit_rates(self) -> None:
        """Emit the learning rate of the first group, and of each later group that has another one."""
        if self.step % self.options.metrics_every:
            return
        groups = self.optimizer.param_groups
        rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]
        self.check_rates(rates)
        for at, rate in enumerate(rates):
            if at == 0 or rate != rates[0]:
                self.emitter.metric("lr" if at == 0 else f"lr.{at}", rate, step=self.step)

    def check_rates(self, rates: list[float]) -> None:
        """Report rates that stay at zero, which a warm-up and the end of a schedule have in single steps only."""
        if not rates or any(rates):
            self.zero_rates = 0
            return
        self.zero_rates += 1
        if self.zero_rates == 1:
            self.zero_since = self.step
        if self.zero_rates >= ZERO_RATES and "rate-zero" not in self.reported:
            self.reported.add("rate-zero")
            self.report(
                "rate-zero",
                f"the learning rate of every group of {type(self.optimizer).__name__} is 0 in steps "
                f"{self.zero_since} to {self.step}: they move nothing. Look at the schedule, and at how often it "
                "is stepped",
                severity="warning",
            )

    def origin(self) -> tuple[str, str]:
        """Return the block where the run left its course, and a clause that says so; both may be empty."""
        course, can_replay = self.course, self.call is not None and not self.options.is_sharded
        if not course.sizes and course.blocks and can_replay and self.looks_again < MOST_REPLAYS:
            self.looks_again += 1
            self.is_replaying = True
            try:
                course.read_again(self.model, self.call)  # type: ignore[arg-type]
            finally:
                self.is_replaying = False
        if course.sizes and (not course.looks or course.looks[-1].step != self.step):
            course.take(self.step, [], [])
        block, sentence = course.origin()
        if not sentence and course.has_outputs():
            sentence = f"all {len(course.blocks)} blocks are on their course: look at the loss and its data"
        for name, module, value in course.metrics():
            self.emitter.metric(name, value, step=self.step, module=module)
        return block, f"; {sentence}" if sentence else ""

    def replay(self) -> str:
        """Return where the forward stops being finite, in words."""
        if self.call is None or self.options.is_sharded or self.replays >= MOST_REPLAYS:
            return ""  # the forward of a sharded model needs the other ranks
        self.replays += 1
        return f"; {self.without_hooks(find_nonfinite)[1]}"

    def without_hooks(self, search: Callable[..., Any], *args: Any) -> Any:
        """Search in a replay of the last call, which must not be taken for a call of the run."""
        call, self.call, self.is_replaying = self.call, None, True
        try:
            return search(self.model, call, *args)
        finally:
            self.is_replaying = False

    def check_identity(self) -> None:
        """Check that the optimizer has the model's parameters, and a wrapper too."""
        for message in check_reduced(self.model):
            self.report("not-reduced", message)
        others = self.options.other_optimizers
        for rule, severity, message in check_identity(self.model, self.optimizer, others):
            self.report(rule, message, severity=severity)

    def check_start(self) -> None:
        """Check the weights and the optimizer's state before the first step."""
        given = self.options.weights_from
        if given is not None:
            for message in weights_that_differ(self.model, given):
                self.report("weights-not-loaded", message)
        names = {id(p): name for name, p in self.named}
        for name, message in check_state(self.optimizer, names):
            self.report("state-not-zero", message, module=name)
        if self.options.config is not None:
            for message in check_hyperparameters(
                expected_values(self.options.config), [self.optimizer]
            ):
                self.report("hyperparameter", message)
        wanted = self.options.resumed_from
        if wanted is not None and state_digest(self.optimizer) != wanted:
            self.report(
                "state-not-resumed",
                "the optimizer's state is not that of the checkpoint: its digest differs",
            )

    def reads_all(self) -> bool:
        """Return whether this step reads all gradients, and not only a sample of them."""
        return self.wrong or self.alarmed or self.looks() or not is_sample_finite(self.few)

    def looks(self) -> bool:
        """Return whether this step reads all gradients and the outputs of blocks, whatever happens in it."""
        options = self.options
        return (
            self.steps < options.patience
            or self.step % options.gradients_every == 0
            or self.step % options.every == 0
            or self.samples_blocks()
        )

    def samples_blocks(self) -> bool:
        """Return whether this step samples blocks."""
        every = self.options.blocks_every
        return every is not None and (self.steps < 2 or self.step % every == 0)

    def check_blocks(self) -> None:
        """Emit the sizes of blocks, and report a block whose mathematics or magnitudes are wrong."""
        idle = []
        if (
            not self.options.is_sharded and self.course.looks
        ):  # of a sharded one a rank may hold nothing
            gradients = zip(
                self.course.blocks.items(), self.course.looks[-1].gradients, strict=True
            )
            idle = [
                name
                for (name, block), size in gradients
                if not size and any(p.requires_grad for p in block.parameters())
            ]
        metrics, verdicts = self.samples.take(idle)
        for metric, block, value in metrics:
            self.emitter.metric(metric, value, step=self.step, module=block)
        for one in verdicts:
            self.report(one.rule, one.message, severity="warning", module=one.block)

    def check_gradients(self, pairs: list[tuple[str, Tensor]]) -> None:
        """Check that gradients are finite and within the limit."""
        self.norm_steps += 1
        grads: list[Tensor] = [p.grad for _, p in pairs if p.grad is not None]
        norms = norms_of(grads)
        scale = getattr(self.optimizer, "grad_scale", None)  # of a GradScaler and a fused step
        factor = 1.0 if scale is None else 1 / float(scale)
        total = total_of(norms) * factor
        wrong = nonfinite_places(grads, norms) if not math.isfinite(total) else []
        if not wrong and math.isinf(total):
            total = total_of(wide_norms_of(grads)) * factor
        self.total = total
        self.flowing.update(  # a rank may have an empty shard of a parameter
            name
            for (name, p), norm in zip(pairs, norms, strict=True)
            if norm or not local_part(p).numel()
        )
        if wrong:
            self.wrong = True
            last = wrong[-1]  # the first in the order of the backward
            self.report(
                "nonfinite-gradient",
                f"{describe_nonfinite(grads[last])}; {len(wrong)} of {len(grads)} gradients in all{self.replay()}",
                module=pairs[last][0],
            )
        self.course.take(self.step, pairs, [norm * factor for norm in norms])
        self.judge("grad.norm", total)
        limit = self.options.max_norm
        if limit is not None and not self.options.is_sharded:
            self.clipped_steps += limit / ABOVE_LIMIT <= total <= limit * ABOVE_LIMIT
            if limit * ABOVE_LIMIT < total < math.inf:
                block, why = self.course.origin()
                self.report(
                    "norm-above-limit",
                    f"the optimizer reads gradients of norm {total:.6g}, above {limit:g}: they were not clipped, or "
                    f"clipped before the last of them was added{f'; {why}' if why else ''}",
                    value=total,
                    module=block,
                )

    def check_flow(self, names: list[str]) -> None:
        """Report parameters that have had no gradient, or only zeros; each is judged by itself."""
        idle = [name for name in names if name not in self.flowing]
        grads = {name: p.grad for name, p in self.named}
        zeros = [name for name in idle if grads[name] is not None]
        cancelled = set(self.cancelled_biases(zeros))
        for rule, found in (
            ("no-gradient", [name for name in idle if grads[name] is None]),
            ("zero-gradient", [name for name in zeros if name not in cancelled]),
        ):
            if not found:
                continue
            why = ""
            if rule == "no-gradient" and self.call is not None and not self.options.is_sharded:
                why = f"; {self.without_hooks(find_end_of_graph, found)}"
            self.report(
                rule,
                f"{len(found)} of {len(names)} trainable parameters in {self.options.patience} steps: "
                f"{name_some(found)}{why}",
                severity="warning",
                module=found[0],
            )

    def cancelled_biases(self, zeros: list[str]) -> list[str]:
        """Return the parameters whose gradient is zero by the nature of the model, of those that have only zeros.

        A bias has one if the sum of its output's gradients is zero: before a batch norm, for all keys of a softmax, or
        in a loss of differences. A replay shows that the output of its module depends on it; where there is none, it is
        taken for that. Of a sharded model this rank's shard of a parameter may have zeros only, so that parameters are
        judged with the others of their module there.
        """
        alive = {module_of(name) for name in self.flowing}
        beside = [name for name in zeros if module_of(name) in alive]
        if self.options.is_sharded:
            return beside
        biases = [name for name in beside if name.rpartition(".")[2].endswith("bias")]
        if not biases or self.call is None:
            return biases
        call = self.call
        try:
            return list(self.without_hooks(find_cancelled, biases))
        finally:
            self.call = call

    def check_weights(self) -> None:
        """Check that the weights are finite after the step."""
        weights: list[Tensor] = [p for _, p in self.named]
        for at in nonfinite_places(weights, norms_of(weights)):
            self.wrong = True
            name = self.named[at][0]
            if "nonfinite-weight" not in self.reported:  # what follows is its consequence
                self.reported.add("nonfinite-weight")
                self.report("nonfinite-weight", describe_nonfinite(weights[at]), module=name)

    def check_base(self) -> None:
        """Check that weights under adapters keep their bits; see [Note: merging does not undo itself]."""
        if "base-weights-changed" in self.reported:  # every later step has them too
            return
        optimizers = (self.optimizer, *self.options.other_optimizers)
        trained = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        message = self.base.changed(self.step, trained)
        if message:
            self.reported.add("base-weights-changed")
            self.report("base-weights-changed", message)

    def check_moments(self) -> None:
        """Check that the optimizer's state is finite, and that means of squares are not negative."""
        names = {id(p): name for name, p in self.named}
        for rule, name, message in check_running_state(self.optimizer, names):
            if rule not in self.reported:  # the first parameter of a rule is enough
                self.reported.add(rule)
                self.report(rule, message, module=name)

    def check_replicas(self) -> None:
        """Compare the parameters of the ranks of the group, now and then."""
        every = self.options.agree_every
        if every is None or (self.step + 1) % every:
            return
        options = self.options
        found = []
        if options.tensor_group is None or options.group is not None:
            found.append(rank_agreement(self.model, options.group, on_difference="report"))
        if options.tensor_group is not None:
            whole = replicated_tensors(self.model, options.tensor_group, options.sharded)
            found.append(rank_agreement(whole, options.tensor_group, on_difference="report"))
        for each in (each for one in found if one is not None for each in one.differences):
            self.report("replicas-differ", str(each), module=each.parameter)

    def check_update(self, ratio: float, still: list[str]) -> None:
        """Check how far a step moved the weights."""
        self.emitter.metric("update.ratio", ratio, step=self.step)
        new = [name for name in still if name not in self.reported]
        self.reported.update(new)
        if new:
            self.report(
                "not-moved",
                f"{len(new)} parameters have a gradient and a learning rate, and the step changed no bit of them: "
                f"{name_some(new)}. The update may be below half a unit of their last place",
                severity="warning",
                module=new[0],
            )


def is_one_of_many() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def module_of(name: str) -> str:
    """Return the module of a parameter."""
    return name.rpartition(".")[0]
