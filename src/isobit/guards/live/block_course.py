"""Follow the size of every block's output and gradients, to name the block where an explosion starts.

[Note: the first block that leaves its course]
A look is the root mean square of each block's output (of 4,096 elements) and of its gradients (of all; their norms are
read anyway). The last 256 looks are kept. When the loss or the norm leaves its course, blocks are compared with their
own medians over these looks. A block whose output is far above its median while those before it in the forward are not
is where an explosion starts. If all outputs are on their course and gradients are not, the last such block in the
forward is the first in the backward. Outputs of a compiled model are not read, and then no block is named: what grows
in the forward of one block grows in the gradients of those before it. Hooks are on the blocks only during the forward
of a step that looks: torch takes another path through some modules, such as TransformerEncoderLayer in evaluation, if
they have hooks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobit.guards.live.drift import median_and_deviation
from isobit.guards.live.gradient_checks import local_part
from isobit.guards.live.module_replay import ModelCall, as_it_was, tensors_in, unwrapped

LOOKS, FEWEST = (
    256,
    8,
)  # that are kept, so that a divergence is found before it fills half; that are needed
OFF = 6.0  # robust standard deviations of the logarithm
LEAST = (
    math.log(2) / OFF
)  # of a standard deviation: a block that hardly moves is off from twice its median on
SAMPLED_ELEMENTS = 2**12
MOST_BLOCKS = 256
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Look:
    """The sizes of blocks at a step, in the order of their names; None where nothing was read."""

    step: int
    outputs: tuple[float | None, ...]
    gradients: tuple[float | None, ...]


class BlockCourse:
    """The blocks of a model, and the last looks at them.

    Args:
        model: The model. One with a single block, or more than 256, is not followed.
    """

    def __init__(self, model: nn.Module) -> None:
        found = dict(blocks_of(model))
        self.blocks = found if 1 < len(found) <= MOST_BLOCKS else {}
        self.places = {id(module): at for at, module in enumerate(self.blocks.values())}
        self.owners = {
            id(parameter): at
            for at, block in enumerate(self.blocks.values())
            for parameter in block.parameters()
        }
        self.looks: deque[Look] = deque(maxlen=LOOKS)
        self.handles: list[Any] = []
        self.sizes: dict[int, Tensor] = {}  # of outputs, in the order of the forward

    def start(self) -> None:
        """Read the outputs of the forward that begins now."""
        self.handles = [block.register_forward_hook(self.read) for block in self.blocks.values()]

    def stop(self) -> None:
        """End the reading of outputs."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.no_grad()
    def read(self, block: nn.Module, args: Any, output: Any) -> None:
        """Take the size of a block's output; of several micro-batches, the largest."""
        if torch.compiler.is_compiling() or not self.handles:
            return
        found = next((t for t in tensors_in(output) if t.is_floating_point()), None)
        if (
            found is None
            or not found.numel()
            or torch._C._functorch.is_functorch_wrapped_tensor(found)
        ):
            return
        flat = local_part(found).reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]
        size = torch.linalg.vector_norm(sample, dtype=torch.float32) / math.sqrt(sample.numel())
        at = self.places[id(block)]
        before = self.sizes.get(at)
        self.sizes[at] = size if before is None else torch.maximum(before, size)

    def read_again(self, model: nn.Module, call: ModelCall) -> None:
        """Read the outputs of a call that no look was planned for, by running its forward again."""
        try:
            with torch.no_grad(), as_it_was(model, call):
                self.start()
                unwrapped(model)(*call.args, **call.kwargs)
        finally:
            self.stop()

    def take(self, step: int, pairs: Sequence[tuple[str, Tensor]], norms: Sequence[float]) -> None:
        """Keep a look: outputs that were read, and gradients by the norms of their parameters."""
        if not self.blocks:
            return
        outputs: list[float | None] = [None] * len(self.blocks)
        for at, size in self.sizes.items():
            outputs[at] = float(size)
        squares, counts = [0.0] * len(self.blocks), [0] * len(self.blocks)
        for (_, parameter), norm in zip(pairs, norms, strict=True):
            owner = self.owners.get(id(parameter))
            if owner is not None:
                squares[owner] += norm * norm
                counts[owner] += local_part(parameter).numel()
        gradients = [math.sqrt(s / n) if n else None for s, n in zip(squares, counts, strict=True)]
        if self.looks and self.looks[-1].step == step:
            self.looks.pop()
        self.looks.append(Look(step, tuple(outputs), tuple(gradients)))

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Yield name, block and value of the last look."""
        if self.looks:
            look = self.looks[-1]
            for name, values in (("output.rms", look.outputs), ("grad.rms", look.gradients)):
                for block, value in zip(self.blocks, values, strict=True):
                    if value is not None:
                        yield name, block, value

    def has_outputs(self) -> bool:
        """Return whether the last of enough looks has read the outputs of blocks."""
        enough = len(self.looks) >= FEWEST
        return enough and any(value is not None for value in self.looks[-1].outputs)

    def origin(self) -> tuple[str, str]:
        """Return the block where sizes left their course, and a sentence; both are empty if all are on it."""
        if len(self.looks) < FEWEST:
            return "", ""
        off = {
            kind: [
                off_course([getattr(look, kind)[at] for look in self.looks])
                for at in range(len(self.blocks))
            ]
            for kind in ("outputs", "gradients")
        }
        names = list(self.blocks)
        order = [*self.sizes, *(at for at in range(len(names)) if at not in self.sizes)]
        found = []
        for kind, places in (("outputs", order), ("gradients", order[::-1])):
            began = len(self.looks)
            while began and any(off[kind][at][began - 1] for at in places):
                began -= 1
            if began < len(self.looks):
                at = next(at for at in places if off[kind][at][began])
                found.append((kind, began, at, sum(off[kind][each][began] for each in places)))
        has_outputs = self.has_outputs()
        if not found:
            on_course = (
                f"all {len(names)} blocks are on their course: look at the loss and its data"
            )
            return "", on_course if has_outputs else ""
        kind, began, at, count = found[0]
        values = [getattr(look, kind)[at] for look in self.looks]
        middle = median_and_deviation(sorted(v for v in values if v is not None))[0]
        forward = kind == "outputs"
        earlier = next((other for other in found[1:] if other[1] < began), None)
        outputs = "all outputs are on their course" if has_outputs else "outputs were not read"
        return names[at] if has_outputs else "", (
            f"{names[at]} is the first in the {'forward' if forward else 'backward'} of {count} blocks (of "
            f"{len(names)}) that leave their course at step {self.looks[began].step}: the root mean square of "
            f"its {'output' if forward else 'gradients'} is {values[began]:.4g}, and {middle:.4g} is usual"
            + ("" if forward else f"; {outputs}")
            + (
                f"; gradients left theirs at step {self.looks[earlier[1]].step}, first in {names[earlier[2]]}"
                if earlier
                else ""
            )
        )


def off_course(values: Sequence[float | None]) -> list[bool]:
    """Return which values are far above the median of all; those that are None are not."""
    logs = [None if value is None else math.log(max(value, 1e-300)) for value in values]
    known = sorted(value for value in logs if value is not None and math.isfinite(value))
    if len(known) < FEWEST:
        return [False] * len(values)
    middle, spread = median_and_deviation(known)
    limit = middle + OFF * max(1.4826 * spread, LEAST)
    return [value is not None and not value <= limit for value in logs]


def blocks_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model by name: the entries of its outermost lists, and what stands next to these.

    Args:
        model: The model, or a part of it that contains a list of modules.
        prefix: The name of the part.
    """
    for name, child in model.named_children():
        where = f"{prefix}{name}"
        if next(child.parameters(), None) is None:
            continue
        is_entry = isinstance(model, LISTS) and not isinstance(child, LISTS)
        if not is_entry and any(isinstance(each, LISTS) for each in child.modules()):
            yield from blocks_of(child, f"{where}.")
        else:
            yield where, child
