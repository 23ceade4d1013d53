"""The blocks of a model while it trains: where an explosion starts, and whether mathematics or magnitudes are wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from isobit.guards.live.drift import median_and_deviation
from isobit.guards.live.module_replay import ModelCall, as_it_was, tensors_in, unwrapped
from isobit.guards.live.optimizer_checks import local_part

# Follow the size of every block's output and gradients, to name the block where an explosion starts.
#
# [Note: the first block that leaves its course] A look is the root mean square of each block's output (of 4,096
# elements) and of its gradients (of all; their norms are read anyway). The last 256 looks are kept. When the loss or
# the norm leaves its course, blocks are compared with their own medians over these looks. A block whose output is far
# above its median while those before it in the forward are not is where an explosion starts. If all outputs are on
# their course and gradients are not, the last such block in the forward is the first in the backward. Outputs of a
# compiled model are not read, and then no block is named: what grows in the forward of one block grows in the
# gradients of those before it. Hooks are on the blocks only during the forward of a step that looks: torch takes
# another path through some modules, such as TransformerEncoderLayer in evaluation, if they have hooks.

LOOKS, FEWEST_LOOKS = (
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
        enough = len(self.looks) >= FEWEST_LOOKS
        return enough and any(value is not None for value in self.looks[-1].outputs)

    def origin(self) -> tuple[str, str]:
        """Return the block where sizes left their course, and a sentence; both are empty if all are on it."""
        if len(self.looks) < FEWEST_LOOKS:
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
    if len(known) < FEWEST_LOOKS:
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


# Sample every block's input, output and gradient, to tell wrong mathematics from wrong magnitudes, and name the block.
#
# [Note: mathematics or magnitudes] A sample is 1,024 elements, evenly spread, of a block's input, of its output and
# of the output's gradient. A block whose input is finite and whose output is not computes something wrong, whatever
# came before it; so does a block that receives a gradient and passes on none, or one that is not finite. A block
# whose numbers are finite and 16 times as large, or small, as those of its neighbours of the same class has a wrong
# scale. What a residual block adds to its input is compared, not the sum, which grows with depth; the largest
# sixteenth of a sample does not count, since trained models have a few channels that are far larger than all others.
# If every block multiplies its input, none is wrong by itself: that is the initialisation's or the learning rate's.

ELEMENTS = 1024
TRIMMED = ELEMENTS // 16  # the largest, which do not count for the size
FACTOR = 16.0  # of a block's size against its neighbours
GROWTH = 4.0  # of all blocks
NEIGHBOURS = 2  # on each side
FEWEST_BLOCKS = 4  # blocks of a class that can be compared
TWICE = 2  # samples in a row in which something is found before it is reported


@dataclass(frozen=True)
class Sizes:
    """What a sample of one tensor shows.

    Attributes:
        rms: The root mean square.
        max: The largest absolute value.
        finite: The share of finite elements.
        usual: The root mean square without the largest sixteenth.
    """

    rms: float
    max: float
    finite: float
    usual: float


@dataclass(frozen=True)
class Verdict:
    """A rule, the block that it names ("" for all), and a sentence."""

    rule: str
    block: str
    message: str


class BlockSamples:
    """Samples of the blocks of a model in one step, and what is wrong in several steps in a row.

    Args:
        blocks: Modules by name.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.blocks = dict(blocks)
        self.names = {id(module): name for name, module in self.blocks.items()}
        self.handles: list[Any] = []
        self.made: dict[int, tuple[Tensor, str]] = {}  # outputs of this forward
        self.order: list[str] = []
        self.before: dict[str, str] = {}  # the block whose output a block reads
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.added: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.seen: dict[tuple[str, str], int] = {}  # samples in a row
        self.reported: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Sample the forward that begins now, and its backward."""
        self.handles = [block.register_forward_hook(self.read) for block in self.blocks.values()]

    def stop(self) -> None:
        """End the sampling of a forward; gradients are still read."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.made = [], {}

    def clear(self) -> None:
        """Drop the samples of a step."""
        for kept in (self.order, self.before, self.inputs, self.outputs, self.added):
            kept.clear()
        self.gradients = {}  # hooks of a graph that still exists write into the old one

    @torch.no_grad()
    def read(self, block: nn.Module, args: Any, output: Any) -> None:
        """Sample a block's input and output; of several micro-batches the first, of several calls the first."""
        name = self.names.get(id(block), "")
        if torch.compiler.is_compiling() or not self.handles or not name or name in self.outputs:
            return
        given, found = first_floating(args), first_floating(output)
        if found is None:
            return
        self.order.append(name)
        self.outputs[name] = sample(found)
        if given is not None:
            self.inputs[name] = sample(given)
            if given.shape == found.shape:
                self.added[name] = self.outputs[name] - self.inputs[name]
            source = self.made.get(id(given))
            if source is not None:
                self.before[name] = source[1]
        self.made[id(found)] = (found, name)
        if found.requires_grad:
            found.register_hook(partial(keep_sample, self.gradients, name))  # type: ignore[no-untyped-call]

    def take(self, idle: Sequence[str]) -> tuple[list[tuple[str, str, float]], list[Verdict]]:
        """Return metrics (name, block, value) of the samples of this step, and what is reported now.

        Args:
            idle: Blocks whose trainable parameters have no gradient, or only zeros, in this step.
        """
        kinds = {"input": self.inputs, "output": self.outputs, "added": self.added}
        kinds["output.grad"] = self.gradients
        found = {kind: sizes_of(samples) for kind, samples in kinds.items()}
        metrics = [
            (f"{kind}.{field}", name, getattr(found[kind][name], field))
            for kind in ("output", "output.grad")
            for field in ("rms", "max", "finite")
            for name in found[kind]
        ]
        verdicts = list(self.judge(found, idle))
        now = {
            (one.rule, one.block): self.seen.get((one.rule, one.block), 0) + 1 for one in verdicts
        }
        self.seen = now
        self.clear()
        reported = []
        for one in verdicts:
            key = (one.rule, one.block)
            needed = 1 if one.rule == "block-nonfinite" else TWICE
            if now[key] >= needed and key not in self.reported:
                self.reported.add(key)
                reported.append(one)
        return metrics, reported

    def judge(
        self, found: Mapping[str, Mapping[str, Sizes]], idle: Sequence[str]
    ) -> Iterator[Verdict]:
        """Yield what is wrong in this sample: mathematics, and if that is right, magnitudes."""
        wrong = list(self.of_mathematics(found, idle))
        yield from wrong
        if not any(one.rule == "block-nonfinite" for one in wrong):
            yield from self.of_magnitudes(found)

    def of_mathematics(
        self, found: Mapping[str, Mapping[str, Sizes]], idle: Sequence[str]
    ) -> Iterator[Verdict]:
        """Yield blocks that make numbers that are not finite, or stop the gradient."""
        given, made, grads = found["input"], found["output"], found["output.grad"]
        for name in self.order:
            if made[name].finite < 1:
                if name in given and given[name].finite == 1:
                    yield Verdict(
                        "block-nonfinite", name, words_of(name, "input", "output", made[name])
                    )
                return  # what comes after it reads these numbers
        for name in reversed(self.order):
            source = self.before.get(name, "")
            if name not in grads or source not in grads or grads[name].finite < 1:
                continue
            if grads[source].finite < 1:
                words = words_of(
                    name, "gradient of the output", "gradient of the input", grads[source]
                )
                yield Verdict("block-nonfinite", name, words)
                return
            if grads[name].max > 0 and grads[source].max == 0:
                message = (
                    f"the mathematics of {name} are wrong: its output has a gradient, and its input "
                    f"has only zeros ({ELEMENTS:,} elements sampled)"
                )
                yield Verdict("block-zero-gradient", name, message)
        if len(idle) < len(self.order):
            for name in idle:
                if name in grads and grads[name].max > 0:
                    message = (
                        f"the mathematics of {name} are wrong: its output has a gradient, and all of its "
                        "trainable parameters have none, or only zeros"
                    )
                    yield Verdict("block-zero-gradient", name, message)

    def of_magnitudes(self, found: Mapping[str, Mapping[str, Sizes]]) -> Iterator[Verdict]:
        """Yield blocks that are far larger or smaller than their neighbours; if all grow, one verdict for all."""
        for group in self.groups():
            for kind, words in (
                ("added", "what it adds to its input"),
                ("output.grad", "its gradient"),
            ):
                sizes = {name: found[kind][name].usual for name in group if name in found[kind]}
                yield from outliers(sizes, words)
            ratios = [
                found["output"][name].usual / found["input"][name].usual
                for name in group
                if name in found["input"] and found["input"][name].usual > 0
            ]
            factor = median(ratios) if len(ratios) >= FEWEST_BLOCKS else 1.0
            if factor > GROWTH:
                message = (
                    f"magnitudes are wrong everywhere: a block multiplies its input by {factor:.3g} (median of "
                    f"{len(ratios)} blocks); look at the initialisation, the scale of residual branches, "
                    "and the learning rate"
                )
                yield Verdict("blocks-grow", "", message)

    def groups(self) -> Iterator[list[str]]:
        """Yield blocks of one class in one list, in the order of the forward."""
        found: dict[tuple[str, type], list[str]] = {}
        for name in self.order:
            found.setdefault((name.rpartition(".")[0], type(self.blocks[name])), []).append(name)
        yield from (names for names in found.values() if len(names) >= FEWEST_BLOCKS)


def words_of(name: str, before: str, after: str, sizes: Sizes) -> str:
    """Say that a block makes numbers that are not finite."""
    wrong = round((1 - sizes.finite) * ELEMENTS)
    return (
        f"the mathematics of {name} are wrong: its {before} is finite, and {wrong:,} of {ELEMENTS:,} sampled elements "
        f"of its {after} are not"
    )


def outliers(sizes: Mapping[str, float], what: str) -> Iterator[Verdict]:
    """Yield the block that differs most from the median of its neighbours, if it is by more than the factor."""
    names = [name for name, size in sizes.items() if 0 < size < math.inf]
    if len(names) < FEWEST_BLOCKS:
        return
    logs = [math.log(sizes[name]) for name in names]
    offsets = offsets_of(logs)
    at = max(range(len(logs)), key=lambda at: abs(offsets[at]))
    # How much the others differ among themselves, without this one between them.
    usual = median(abs(offset) for offset in offsets_of(logs[:at] + logs[at + 1 :]))
    if abs(offsets[at]) <= max(math.log(FACTOR), 6 * usual):
        return
    factor = math.exp(offsets[at])
    said = f"{factor:.3g} times" if factor > 1 else f"1/{1 / factor:.3g}"
    message = (
        f"the magnitudes of {names[at]} are wrong: {what} is {said} that of its neighbours ({sizes[names[at]]:.3g}; "
        f"{len(names)} blocks of its class are compared); its numbers are finite"
    )
    yield Verdict("block-scale", names[at], message)


def offsets_of(logs: Sequence[float]) -> list[float]:
    """Return how far each number is from the median of its neighbours."""
    return [
        own - median([*logs[max(0, at - NEIGHBOURS) : at], *logs[at + 1 : at + 1 + NEIGHBOURS]])
        for at, own in enumerate(logs)
    ]


def first_floating(value: Any) -> Tensor | None:
    """Return the first floating-point tensor with elements, if it is a plain one."""
    found = next((t for t in tensors_in(value) if t.is_floating_point()), None)
    if found is None or not found.numel() or found.layout != torch.strided:
        return None
    return None if torch._C._functorch.is_functorch_wrapped_tensor(found) else found


def sample(tensor: Tensor) -> Tensor:
    """Return 1,024 elements, evenly spread, in double precision; a smaller tensor has some of them twice."""
    flat = local_part(tensor.detach()).reshape(-1)
    if not flat.numel():
        return torch.zeros(ELEMENTS, dtype=torch.float64, device=flat.device)
    step = flat.numel() // ELEMENTS
    if step:
        return flat[: step * ELEMENTS : step].double()
    return flat[torch.arange(ELEMENTS, device=flat.device) * flat.numel() // ELEMENTS].double()


def keep_sample(kept: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    """Keep a sample of a gradient; of several backward calls the first."""
    if name not in kept and gradient.layout == torch.strided:
        with torch.no_grad():
            kept[name] = sample(gradient)


def sizes_of(samples: Mapping[str, Tensor]) -> dict[str, Sizes]:
    """Return what samples show; one transfer from a device for all."""
    if not samples:
        return {}
    device = next(iter(samples.values())).device
    rows = torch.stack([each.to(device) for each in samples.values()]).abs()  # [blocks, ELEMENTS]
    ordered = rows.sort(-1).values
    table = torch.stack(
        [
            rows.square().mean(-1).sqrt(),
            rows.amax(-1),
            rows.isfinite().double().mean(-1),
            ordered[:, :-TRIMMED].square().mean(-1).sqrt(),
        ],
        -1,
    )
    return {name: Sizes(*row) for name, row in zip(samples, table.tolist(), strict=True)}
