"""`Spans`: a training run as OpenTelemetry spans: run, step, micro-batch, block, operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isobit.errors import ArgumentError
from isobit.guards.live.optimizer_checks import unwrapped_optimizer
from isobit.guards.live.watching import ModelHook
from isobit.guards.sinks import load

DEPTHS = ("run", "step", "micro-batch", "block", "operator")


class Spans:
    """Spans of a run: `isobit.run` > `isobit.step` > `isobit.micro-batch` > `isobit.block` > `isobit.operator`.

    A step lasts from its first forward to the end of the optimizer's step, a micro-batch from its forward to the next
    one or to the step, so that it includes its backward. Blocks and operators are forwards. A block is a module of an
    outermost `ModuleList`, or a child of a model that has none; an operator is a module without modules inside. Only
    the depths that are asked for have hooks. On a GPU, a span measures the time until work is queued;
    what the device does is in a trace of torch.profiler, which `isobit profile` reads.

    Args:
        model: The model that the training loop calls.
        optimizer: Its optimizer.
        depth: The innermost spans: one of "step", "micro-batch", "block", "operator".
        every: Only each `every`-th step has spans, by its number.
        run: The name of the run.
        tracer_provider: None is the global one.

    Raises:
        ArgumentError: If an argument is not supported, or opentelemetry-api is not installed.

    Example:
        >>> from isobit.guards import Spans
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with Spans(model, optimizer, depth="step") as spans:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> spans.step
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        depth: str = "micro-batch",
        every: int = 1,
        run: str = "",
        tracer_provider: Any = None,
    ) -> None:
        if depth not in DEPTHS[1:] or every < 1:
            raise ArgumentError(
                expected=f"a depth of {DEPTHS[1:]}, and every of at least 1",
                received=f"depth={depth!r}, every={every}",
                remedy="choose one of these",
            )
        optimizer = unwrapped_optimizer(optimizer)
        self.trace = load("opentelemetry.trace", "opentelemetry-api")
        self.tracer = self.trace.get_tracer("isobit", tracer_provider=tracer_provider)
        self.model, self.every, self.step, self.micro_batch = model, every, 0, 0
        self.depth = DEPTHS.index(depth)
        self.open: list[tuple[int, Any]] = []  # the level of each span that has not ended
        self.start(0, run=run)
        self.handles: list[Any] = [
            model.register_forward_pre_hook(ModelHook(self.before_forward)),
            optimizer.register_step_post_hook(self.after_step),
        ]
        named = {3: blocks_of(model), 4: operators_of(model)}
        for level, modules in named.items():
            for name, module in modules.items() if level <= self.depth else ():
                self.follow(level, name, module)

    def follow(self, level: int, name: str, module: nn.Module) -> None:
        """Add hooks that make a span of each forward of a module."""

        def before(*_: Any) -> None:
            if self.open[-1][0] in range(2, level):
                self.start(level, module=name)

        def after(*_: Any) -> None:
            if self.open[-1][0] == level:
                self.end(level)

        self.handles += [
            module.register_forward_pre_hook(ModelHook(before)),
            module.register_forward_hook(ModelHook(after), always_call=True),
        ]

    def before_forward(self, model: nn.Module, args: Any) -> None:
        """Start a step with its first micro-batch, or the next micro-batch."""
        if self.step % self.every or not (torch.is_grad_enabled() and model.training):
            return
        if len(self.open) == 1:
            self.start(1, step=self.step)
            self.micro_batch = 0
        self.end(2)
        if self.depth >= 2:
            self.start(2, step=self.step, micro_batch=self.micro_batch)
        self.micro_batch += 1

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step."""
        self.end(1)
        self.step += 1

    def start(self, level: int, **fields: Any) -> None:
        """Start a span inside of the innermost one."""
        parent = self.trace.set_span_in_context(self.open[-1][1]) if self.open else None
        attributes = {f"isobit.{name}": value for name, value in fields.items()}
        span = self.tracer.start_span(
            f"isobit.{DEPTHS[level]}", context=parent, attributes=attributes
        )
        self.open.append((level, span))

    def end(self, level: int) -> None:
        """End the spans of a level and of those inside."""
        while self.open and self.open[-1][0] >= level:
            self.open.pop()[1].end()

    def __enter__(self) -> Spans:
        """Return the spans."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all spans."""
        self.close()

    def close(self) -> None:
        """Remove the hooks and end all spans. A second call does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.end(0)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the outermost ModuleLists, or the children if there is no ModuleList."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    found = {
        f"{name}.{at}": block
        for name in outermost
        for at, block in model.get_submodule(name).named_children()
    }
    return found or dict(model.named_children())


def operators_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have no modules inside; the model itself is none of them."""
    return {
        name: module
        for name, module in model.named_modules()
        if name and next(module.children(), None) is None
    }
