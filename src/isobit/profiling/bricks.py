"""Bricks: device time by operator and shapes, by transfer, by collective, each with its bound; and by block."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from isobit.profiling.account import (
    COMPUTE,
    COPIES,
    EARLIER,
    EXPOSED,
    Books,
    earlier_work,
    only_starts_a_collective,
    tiles,
)
from isobit.profiling.bounds import Bound, Machine, least_copy, least_time, machine_of, need_of
from isobit.profiling.order_names import DEPENDENT, NO_SUM, Order, order_of, tile_of
from isobit.profiling.records import Block, Brick
from isobit.profiling.trace import Event, Step, Trace

NO_OPERATOR = "launched before the trace, or by no operator"
LONGEST_SHAPES = 120
LARGEST_MESSAGE = 1 << 60  # elements


class Growing:
    """One brick while slices are added."""

    def __init__(self, kind: str, operator: str, shapes: str, dtypes: str) -> None:
        self.kind, self.operator, self.shapes, self.dtypes = kind, operator, shapes, dtypes
        self.calls: dict[int, Event | None] = {}
        self.kernels: Counter[str] = Counter()
        self.names: Counter[str] = Counter()  # of kernels, in full
        self.modules: Counter[str] = Counter()
        self.slices, self.ns, self.wall, self.size = 0, 0, 0, 0
        self.bound, self.strict, self.bounded, self.by = 0, 0, True, ""
        self.flops, self.moved = 0, 0

    def finish(self) -> Brick:
        """Return the record."""
        module = self.modules.most_common(1)[0][0] if self.modules else ""
        known = self.bounded and self.bound > 0
        cached = known and self.ns < self.bound
        order = self.order()
        return Brick(
            kind=self.kind,
            operator=self.operator,
            shapes=self.shapes,
            dtypes=self.dtypes,
            module=module,
            calls=len(self.calls),
            slices=self.slices,
            ns=self.ns,
            wall=self.wall,
            bytes=self.size,
            bound=self.bound if known and not cached else 0,
            bound_by="" if not known else "cache" if cached else self.by,
            strict=self.strict if known else 0,
            kernels=tuple(name for name, _ in self.kernels.most_common(3)),
            order=order.on if order else "",
            order_words=order.words if order else "",
            flops=self.flops if known else 0,
            moved=self.moved if known else 0,
        )

    def order(self) -> Order | None:
        """Return the order of addition by the names of kernels: one that depends on something, else the longest's."""
        if self.kind not in ("kernel", "collective") or not self.names:
            return None
        names = [name for name, _ in self.names.most_common()]
        orders = [order_of(name) for name in names]
        found = next((one for one in orders if one.on in DEPENDENT), orders[0])
        tile = next(filter(None, map(tile_of, names)), "") if found.on != NO_SUM else ""
        return replace(found, words=f"tile {tile}; {found.words}") if tile else found


def bricks_of(books: Books, steps: Sequence[Step]) -> tuple[Brick, ...]:
    """Return the bricks of the steps of a trace, the longest first."""
    trace = books.trace
    machine = None if trace.on_cpu else machine_of(trace.gpu)
    found: dict[tuple[str, str, str, str], Growing] = {}
    earlier = earlier_work(trace)
    start, end = steps[0].start, steps[-1].end
    growing: list[Growing] = []  # the brick of each slice
    layers: dict[str, list[tuple[int, int, int]]] = {}
    for event in work_of(trace):
        if event.end < start or event.start >= end:
            continue
        operator = operator_of(event)
        key = key_of(event, operator, event in earlier)
        brick = found.setdefault(key, Growing(*key))
        add(brick, event, operator, machine)
        growing.append(brick)
        cause = EARLIER if event in earlier else layer_of(event)
        layers.setdefault(cause, []).append((event.start, event.end, len(growing) - 1))
    for number, ns in walls_of(books, steps, layers):
        growing[number].wall += ns
    return tuple(
        sorted(
            (b.finish() for b in found.values() if b.ns or b.wall),
            key=lambda b: (-b.ns, b.operator, b.shapes),
        )
    )


def layer_of(event: Event) -> str:
    """Return the layer of the timeline in which a slice of work is."""
    if event.communicates:
        return EXPOSED
    return COPIES if event.kind in ("copy", "set") else COMPUTE


def walls_of(
    books: Books, steps: Sequence[Step], layers: dict[str, list[tuple[int, int, int]]]
) -> Iterator[tuple[int, int]]:
    """Yield (number of a slice, nanoseconds of the steps that are its alone)."""
    covering = {cause: tiles(slices) for cause, slices in layers.items()}
    starts = {cause: [start for start, _, _ in found] for cause, found in covering.items()}
    for step in steps:
        for begin, stop, cause in books.timeline.pieces(step.start, step.end):
            if cause not in covering:
                continue
            index, found = max(bisect_right(starts[cause], begin) - 1, 0), covering[cause]
            while index < len(found) and found[index][0] < stop:
                start, end, number = found[index]
                if end > begin:
                    yield number, min(end, stop) - max(start, begin)
                index += 1


def work_of(trace: Trace) -> list[Event]:
    """Return the slices that are work: of the device, or on a CPU the operators and the collectives."""
    if not trace.on_cpu:
        return trace.device
    operators = [
        e
        for e in trace.host_slices
        if e.kind == "operator" and not e.loading and not only_starts_a_collective(e)
    ]
    return sorted(operators + trace.device, key=lambda event: event.start)


def operator_of(event: Event) -> Event | None:
    """Return the operator with shapes that a slice belongs to, or else the innermost one."""
    if event.kind == "operator":
        return event.shaped or event
    if event.launch is None:
        return None
    return event.launch.shaped or event.launch.operator


def key_of(event: Event, operator: Event | None, earlier: bool) -> tuple[str, str, str, str]:
    """Return kind, operator, shapes and dtypes of the brick that a slice belongs to."""
    if event.communicates:
        return "collective", collective_name(event), message_words(event), ""
    if event.kind in ("copy", "set"):
        return "transfer", event.name.removeprefix("Memcpy "), "", ""
    if earlier:
        return "earlier", "launched before the trace", "", ""
    if operator is None:
        return "kernel", short(event.name), "", ""
    shapes = words_of_shapes(operator.dims) if operator.dims is not None else ""
    dtypes = " ".join(dict.fromkeys(t.removeprefix("c10::") for t in operator.types if t in FLOATS))
    return "kernel", operator.name, shapes, dtypes


FLOATS = {"float", "double", "c10::Half", "c10::BFloat16", "c10::Float8_e4m3fn", "c10::Float8_e5m2"}


def add(brick: Growing, event: Event, operator: Event | None, machine: Machine | None) -> None:
    """Add a slice to its brick; the bound of an operator counts once per call."""
    ns = event.self_time if event.kind == "operator" else event.duration
    brick.ns += ns
    brick.slices += 1
    brick.size += event.size
    brick.kernels[short(event.name)] += ns
    if event.kind == "kernel":
        brick.names[event.name] += ns
    host = event.launch if event.kind != "operator" else event
    if host is not None and host.module:
        brick.modules[host.module] += ns
    call = operator if brick.kind == "kernel" and operator is not None else event
    is_new = id(call) not in brick.calls
    brick.calls[id(call)] = call
    if machine is None:
        brick.bounded = False
    elif is_new:
        bound = bound_of(brick.kind, event, operator, machine)
        if bound is None:
            brick.bounded = False
        else:
            brick.bound += bound.ns
            brick.strict += bound.strict
            brick.flops += bound.flops
            brick.moved += bound.moved
            brick.by = bound.by


def bound_of(kind: str, event: Event, operator: Event | None, machine: Machine) -> Bound | None:
    """Return the bound of one call, or None."""
    if kind == "transfer":
        return least_copy(event.name, event.size, machine)
    if kind != "kernel" or operator is None or operator.dims is None:
        return None
    recorded = operator.dims, operator.types, operator.strides, operator.concrete
    need = need_of(operator.name, *recorded, event.name)
    return None if need is None else least_time(need, machine)


def blocks_of(trace: Trace, steps: Sequence[Step]) -> tuple[Block, ...]:
    """Return device time by block: the repeated modules nearest to the root, forward and backward apart.

    A block is an instance of a class that has several instances under one parent, such as the layers of a decoder.
    Modules are recorded with `with_stack=True`; a backward belongs to the block of its forward by sequence number.
    """
    start, end = steps[0].start, steps[-1].end
    work = [
        (e, e if e.kind == "operator" else e.launch)
        for e in work_of(trace)
        if start <= e.start < end
    ]
    paths = {host.path for _, host in work if host is not None and host.path}
    depth = depth_of_blocks(paths)
    if depth is None:
        return ()
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for event, host in work:
        ns = event.self_time if event.kind == "operator" else event.duration
        name = (
            host.path[depth] if host is not None and len(host.path) > depth else "outside of blocks"
        )
        (backward if host is not None and host.is_backward else forward)[name] += ns
    names = sorted({*forward, *backward}, key=natural)
    return tuple(Block(name, forward[name], backward[name]) for name in names)


def depth_of_blocks(paths: set[tuple[str, ...]]) -> int | None:
    """Return the depth nearest to the root at which a class has several instances under one parent."""
    for depth in range(max((len(path) for path in paths), default=0)):
        instances: dict[Any, set[str]] = {}
        for path in paths:
            if len(path) > depth:
                name = path[depth].rpartition("_")[0] or path[depth]
                instances.setdefault((path[:depth], name), set()).add(path[depth])
        if any(len(found) > 1 for found in instances.values()):
            return depth
    return None


def natural(name: str) -> list[Any]:
    """Return a key that sorts layer 10 after layer 9."""
    return [
        (0, int(word), "") if word.isdecimal() else (1, 0, word)
        for word in re.findall(r"\d{1,9}|\D+", name)
    ]


def collective_name(event: Event) -> str:
    """Return what a collective is called: by its record, or by its kernel."""
    if event.message is not None:
        return str(event.message.get("Collective name", ""))[:60] or short(event.name)
    return event.name.split(":", 1)[1].strip() if event.kind == "note" else short(event.name)


def message_words(event: Event) -> str:
    """Return elements and dtype of a collective, where recorded."""
    if event.message is not None:
        elements, dtype = event.message.get("In msg nelems"), event.message.get("dtype")
        known = type(elements) is int and 0 <= elements < LARGEST_MESSAGE
        return f"{elements:,} {str(dtype)[:20]}" if known else ""
    return words_of_shapes(event.dims) if event.dims is not None else ""


def words_of_shapes(dims: Any) -> str:
    """Return shapes as text: [64, 128] × [128, 32]; scalars are left out."""
    text = " × ".join(str(shape).replace(" ", "") for shape in dims if shape)
    return text if len(text) <= LONGEST_SHAPES else text[: LONGEST_SHAPES - 1] + "…"


@lru_cache(maxsize=1 << 16)  # a trace has few names
def short(name: str) -> str:
    """Return a kernel's name without its arguments and most of its template."""
    bare = re.sub(r"^void ", "", name)
    head = re.sub(r"\(anonymous namespace\)", "", bare)
    head = re.split(r"[<(]", head, maxsplit=1)[0].rstrip(":") or bare
    return head.split("::")[-1][:80] if len(head) > 80 else head
