"""Watch what torch does while a function runs: which tensors it makes, and from what.

[Note: identity of inputs]
A float input of a kernel is a symbol, and two calls are compared by the names of their symbols. So a tensor must have
the same name in two calls exactly if it is the same input. A tensor that torch made in the call is named by its
*recipe*: the operator, its scalars (not its sizes) and the recipes of the tensors that it was computed from, with a
number among those of one recipe. A tensor from outside the function is named by its storage, which is one object in
all calls; one that the function keeps from an earlier call is named by its recipe in that call. A tensor that is made
outside torch in every call (`torch.from_numpy`) is named by the argument that it is passed as; its content is compared.
Which elements of its parents a tensor was computed from (`views`) is no part of its name, because sizes follow rows;
the judge compares it between row counts.

No list of what torch can do is complete, so names are not trusted alone: the judge also compares what tensors hold. An
element must have one value wherever it has one name ([Note: what is drawn] in draws.py says how that can be).
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from isobit.certifying.running.draws import pass_by, redraw
from isobit.errors import UnsupportedError

DispatchMode: Any = TorchDispatchMode  # untyped in torch

# These read shapes, not values.
VALUELESS = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("size", "stride", "sym_size", "sym_stride", "is_same_size"),
    )
)
MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("clone", "_to_copy", "copy", "cat", "stack", "copy_", "fill_", "zero_"),
        *("normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "exponential_"),
    )
)
OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in ("zero", "fill", "copy", "normal", "uniform", "random", "bernoulli", "exponential")
)
CONSTANT = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
        *("full", "full_like", "new_full"),
    )
)
UNINITIALISED = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        "empty_permuted",
    )
)
RANDOM = frozenset(
    f"aten::{name}"
    for name in (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"),
        *("normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "exponential_"),
    )
)
# A maximum is the same in any order, and so are these.
ORDERLESS = frozenset(
    f"aten::{name}" for name in ("amax", "amin", "any", "all", "argmax", "argmin")
)
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")  # values go to Python
# Arguments that say how large a tensor is or where it is, not what it holds.
SIZES = frozenset(
    ("size", "stride", "layout", "device", "pin_memory", "memory_format", "non_blocking")
)
BETWEEN = ("aten::linspace", "aten::logspace")  # the end of another range says how long it is
OUTSIDE = "a tensor from outside"
SEED = 0  # of torch, when a function is called
STAYS = 1 << 22  # bytes of a storage from outside that is looked at once
SMALL = 1 << 16  # elements that are drawn where only launches matter


# Shape, stride and offset of a view, and the number of elements of its storage.
Elements = tuple[tuple[int, ...], tuple[int, ...], int, int]


class Receiver(Protocol):
    """What takes the launches of a function."""

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Take one launch."""

    def knows(self, storage: int) -> bool:
        """Tell whether a storage was an argument of a launch."""

    def wrote(self, storage: int) -> bool:
        """Tell whether a kernel wrote a storage."""


@dataclass(frozen=True)
class Made:
    """A storage that torch made while the function ran, or changed in place.

    Attributes:
        key: its recipe and a number among those of one recipe; "scratch …" for uninitialised memory.
        operator: what made or last changed it.
        parents: keys of tensors that it was computed from.
        shape: of the tensor that came with it.
        recipe: digest of the operator, its scalars and the recipes of the parents.
        exact: the same with whole numbers, which `recipe` leaves out for integer tensors: they may follow the rows. Of
            floats that were computed from integers it leaves nothing out, since nobody compares their values.
        says: the operator with its scalars, for messages.
        pointwise: whether every element was computed from one element of each parent, or only moved.
        axes: the axes that the operator reduced, if it says so.
        parts: sizes, strides and offsets of parts that were changed in place.
        floats: whether it was made as floats: then its bits are floats, whatever a view of it is called.
        views: of each view that it and its parents were computed from, but for whole tensors.
        undrawn: whether it was computed from random numbers that were not drawn, or from memory that was not
            initialised, so that its values mean nothing.
    """

    key: str
    operator: str
    parents: tuple[str, ...]
    shape: tuple[int, ...]
    recipe: str = ""
    exact: str = ""
    says: str = ""
    pointwise: bool = True
    axes: tuple[int, ...] | None = None
    parts: tuple[int, ...] = ()
    floats: bool = False
    views: tuple[Elements, ...] = ()
    undrawn: bool = False

    @property
    def number(self) -> str:
        """Its number among those of one recipe."""
        return self.key.rpartition(" ")[2]


@dataclass(frozen=True)
class HostRead:
    """Values that went to Python: the key of the tensor, how, and what they were."""

    key: str
    operator: str
    value: str


@dataclass
class Known:
    """Storages that outlive a call: from outside the function, or kept by it.

    Attributes:
        outside: storage -> its key.
        kept: storage -> the key that it had in the call that made it.
        settled: whether all of them have been seen; a storage that comes later belongs to one call.
        contents: storage from outside -> the digest of what it holds, if it is large.
    """

    outside: dict[int, str] = field(default_factory=dict)
    kept: dict[int, Made] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    settled: bool = False
    contents: dict[int, str] = field(default_factory=dict)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the number that identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def views_of(tensors: list[torch.Tensor]) -> list[Elements]:
    """Return which elements of their storages tensors are, but for those that are all elements in their order."""
    return [
        (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), room_of(tensor))
        for tensor in tensors
        if not tensor.is_contiguous() or room_of(tensor) != tensor.numel()
    ]


def room_of(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor's storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def held_by(tensor: torch.Tensor) -> str:
    """Return the digest of what a tensor's elements hold, in the order of its index."""
    with _disable_current_modes():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        size = plain.numel() * plain.element_size()
        memory = (ctypes.c_uint8 * size).from_address(plain.data_ptr())
        return blake3(memoryview(memory).cast("B")).hexdigest()[:16]


def joined(*views: Iterable[Elements]) -> tuple[Elements, ...]:
    """Return views in their order, each once: chains of operators share their parents."""
    return tuple(dict.fromkeys(itertools.chain(*views)))


def digest(*parts: str) -> str:
    """Return a short digest of texts."""
    return blake3("\n".join(parts).encode()).hexdigest()[:12]


def given_arguments(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Return the arguments of an operator with their places in its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args) and not argument.kwarg_only:
            yield argument, args[number]
        elif argument.name in named:
            yield argument, named[argument.name]


def changed_by(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes in place."""
    found = list[torch.Tensor]()
    for argument, value in given_arguments(func, args, named):
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = _pytree.tree_leaves(value)
            found += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return found


def scalars_of(
    func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the arguments that are no tensors and no sizes, as texts: without whole numbers, and all."""
    some, every = [], []
    for argument, value in given_arguments(func, args, named):
        leaves = _pytree.tree_leaves(value)
        is_size = argument.name in SIZES or (
            argument.name == "end" and func._schema.name not in BETWEEN
        )
        if is_size or any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            continue
        seeded = isinstance(value, torch.Generator)
        text = f"{argument.name}={value.initial_seed() if seeded else repr(value)}"
        every.append(text)
        if not any(type(leaf) is int for leaf in leaves):
            some.append(text)
    if func._schema.name in RANDOM and torch.initial_seed() != SEED:
        every.append(f"torch.manual_seed({torch.initial_seed()})")
    if not func.is_view and torch.Tag.pointwise not in func.tags:
        precision = torch.get_float32_matmul_precision()
        every += [f"precision={precision}"] if precision != "highest" else []
    return some, every


def reads_values(func: Any, given: list[torch.Tensor]) -> bool:
    """Tell whether the shape of what an operator returns depends on values: Python reads them by it."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    # An index of integers has their number; one of booleans as many as are true.
    masks = (torch.bool, torch.uint8)
    return func._schema.name != "aten::index" or any(t.dtype in masks for t in given[1:])


@dataclass(eq=False)
class Watch(DispatchMode):  # type: ignore[misc]
    """Notes what torch makes, and raises an error where torch reads what a kernel wrote.

    Attributes:
        made: storage -> what is known of it now.
        history: key -> everything that was made, also what was changed since.
        host_reads: what went to Python.
    """

    receiver: Receiver
    known: Known = field(default_factory=Known)
    lazy: bool = False  # whether many random numbers are not drawn
    bytes: int = 0  # that torch made
    made: dict[int, Made] = field(default_factory=dict)
    history: dict[str, Made] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)  # storages that an operator wrote in place
    counts: dict[str, int] = field(default_factory=dict)
    # key -> storages that kernels were given
    copies: dict[str, list[int]] = field(default_factory=dict)
    fresh: dict[int, str] = field(default_factory=dict)  # made outside torch in this call
    host_reads: list[HostRead] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check one operator's arguments, call it, and note what it made."""
        kwargs = kwargs or {}
        name = func._schema.name
        given = [v for v in _pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        changed = [] if func.is_view else changed_by(func, args, kwargs)
        if not func.is_view and name not in VALUELESS:
            self.check(name, given, changed)
        is_drawn = name in RANDOM or torch.Tag.nondeterministic_seeded in func.tags
        found = self.draw(func, args, kwargs) if is_drawn else func(*args, **kwargs)
        if name in UNINITIALISED and (not self.lazy or found.numel() < SMALL):
            found.untyped_storage().fill_(0xFF)
        if name in READS or reads_values(func, given):
            shapes = [
                list(t.shape) for t in _pytree.tree_leaves(found) if isinstance(t, torch.Tensor)
            ]
            value = repr(shapes or found)
            self.host_reads += [HostRead(self.origin(t).key, name, value) for t in given]
        known = {storage_of(t) for t in given}
        for tensor in changed:
            self.note(tensor, func, args, kwargs, given, before=self.made.get(storage_of(tensor)))
        for tensor in _pytree.tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in known:
                self.note(tensor, func, args, kwargs, given)
        return found

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Draw random numbers; or return memory that nobody touches, where only the launches matter."""
        given = {a.name: v for a, v in given_arguments(func, args, kwargs)}
        name, shape = func._schema.name, given.get("size")
        if shape is None:
            shape = given["self"].shape if isinstance(given.get("self"), torch.Tensor) else ()
        if not self.lazy or math.prod(shape) < SMALL or name not in RANDOM:
            return redraw(lambda: func(*args, **kwargs), name, given)
        pass_by(given.get("generator"))
        if "size" not in given:
            like = given["self"]
            return like if name.endswith("_") else torch.empty_like(like, dtype=given.get("dtype"))
        whole = torch.int64 if "randint" in name else torch.get_default_dtype()
        return torch.empty(given["size"], dtype=given.get("dtype") or whole)

    def check(self, name: str, given: list[torch.Tensor], changed: list[torch.Tensor]) -> None:
        """Raise an error if an operator reads a kernel's result, or changes a kernel's argument."""
        for tensor in given:
            storage = storage_of(tensor)
            if self.receiver.wrote(storage):
                raise UnsupportedError(
                    expected="no torch operator on what a kernel wrote: names of expressions end there",
                    received=f"{name} on a tensor {list(tensor.shape)} that a kernel wrote",
                    remedy="do it in a kernel, or return the tensor before it",
                )
        for tensor in changed:
            self.filled.add(storage_of(tensor))
            if self.receiver.knows(storage_of(tensor)):
                raise UnsupportedError(
                    expected="inputs that stay as they are between two launches",
                    received=f"{name} changes a tensor {list(tensor.shape)} that a kernel has read",
                    remedy="prepare inputs before the first launch, or use a new tensor",
                )

    def note(
        self,
        tensor: torch.Tensor,
        func: Any,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        given: list[torch.Tensor],
        before: Made | None = None,
    ) -> None:
        """Remember a storage that torch made, or (`before`) changed. A copy keeps the key of what it copies.

        With one row a transposed tensor is contiguous and `contiguous()` copies nothing: the key must not change.
        """
        storage, operator = storage_of(tensor), func._schema.name
        if before is None:
            if storage in self.made:
                return
            self.alive.append(tensor.untyped_storage())
            self.bytes += tensor.untyped_storage().nbytes()
            if operator == "aten::clone" and (source := self.made.get(storage_of(given[0]))):
                copied = replace(source, views=joined(source.views, views_of(given)))
                self.made[storage] = self.history[source.key] = copied
                return
        kind = "scratch" if operator in UNINITIALISED else "tensor"
        read = [] if operator in VALUELESS else given
        whole = room_of(tensor) == tensor.numel()
        if operator in OVERWRITES and whole and given[0] is tensor:
            read, before = given[1:], None  # what it held is gone
        others = [self.origin(t) for t in read if before is None or storage_of(t) != storage]
        some, every = scalars_of(func, args, named)
        floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        told = every if floats else some
        start = [operator, str(tensor.dtype)] + ([before.recipe] if before else [])
        parts = [one.exact if floats and not one.floats else one.recipe for one in others]
        numbers = [one.number for one in others]
        recipe = digest(*start, *told, *parts, *numbers)
        exact = digest(*start, *every, *(one.exact for one in others), *numbers)
        axes = next((v for a, v in given_arguments(func, args, named) if a.name == "dim"), None)
        pointwise = torch.Tag.pointwise in func.tags or operator in MOVES
        parents = tuple(one.key for one in others)
        made = Made(
            self.numbered(kind, operator, recipe),
            operator,
            parents,
            tuple(tensor.shape),
            recipe,
            exact,
            f"{operator}({', '.join(every)})",
            pointwise,
            (axes,) if isinstance(axes, int) else None if axes is None else tuple(axes),
            floats=floats,
            views=joined(*(one.views for one in others), views_of(read)),
            undrawn=any(one.undrawn for one in others)
            or (self.lazy and operator in RANDOM | UNINITIALISED and tensor.numel() >= SMALL),
        )
        if before is not None:
            part = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.numel())
            made = replace(
                made,
                parents=(*parents, before.key),
                shape=before.shape,
                undrawn=made.undrawn or before.undrawn,
                parts=before.parts if whole else (*before.parts, *map(int, part)),
                floats=before.floats,
                views=joined(before.views, made.views),
            )
        self.made[storage] = self.history[made.key] = made

    def origin(self, tensor: torch.Tensor) -> Made:
        """Return how a tensor was made; one that is not of this call is an entry of its own at every read."""
        storage = storage_of(tensor)
        if storage in self.made:
            return self.made[storage]
        recipe = self.name_outside(tensor)
        key = self.numbered("read", "", recipe)
        floats = tensor.dtype.is_floating_point
        shape = tuple(tensor.shape)
        found = Made(key, OUTSIDE, (), shape, recipe, recipe, OUTSIDE, floats=floats)
        self.history[key] = found
        return found

    def name_outside(self, tensor: torch.Tensor) -> str:
        """Return what identifies a tensor that torch did not make in this call: how it was made, or what it holds."""
        storage, known = storage_of(tensor), self.known
        if storage in known.kept:
            return known.kept[storage].recipe
        if storage not in known.outside and not known.settled:
            known.outside[storage] = f"outside {len(known.outside)}"
            known.alive.append(tensor.untyped_storage())
        return f"outside {self.content(tensor)}"

    def content(self, tensor: torch.Tensor) -> str:
        """Return the digest of what a tensor's storage holds; what is large is taken to stay."""
        storage, held = storage_of(tensor), tensor.untyped_storage()
        known, size = self.known.contents, held.nbytes()
        if storage in known:
            return known[storage]
        memory = (ctypes.c_uint8 * size).from_address(held.data_ptr())
        found = blake3(memoryview(memory).cast("B")).hexdigest()[:16]
        if size > STAYS and storage in self.known.outside:  # which is kept alive
            known[storage] = found
        return found

    def numbered(self, kind: str, operator: str, recipe: str) -> str:
        """Return the key of the next tensor of a recipe."""
        name = f"{kind} {operator.removeprefix('aten::')} {recipe}"
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        return f"{name} {number}"

    def is_constant(self, storage: int) -> bool:
        """Tell whether torch filled a storage with one number when it made it, and nothing since."""
        made = self.made.get(storage)
        return made is not None and made.operator in CONSTANT and storage not in self.filled

    def was_floats(self, storage: int) -> bool:
        """Tell whether a storage was made as floats."""
        made = self.made.get(storage) or self.known.kept.get(storage)
        return made is not None and made.floats

    def key_of(self, tensor: torch.Tensor, argument: str) -> str:
        """Return the key of a tensor's storage. See [Note: identity of inputs]."""
        storage, known = storage_of(tensor), self.known
        if storage in self.made:
            return self.number_copy(self.made[storage], storage)
        if storage in known.kept:
            return f"kept {known.kept[storage].key}"
        if storage not in known.outside and not known.settled:
            known.outside[storage] = f"outside {len(known.outside)}"
            known.alive.append(tensor.untyped_storage())
        if storage in known.outside:
            return known.outside[storage]
        if storage not in self.fresh:
            same = sum(key.startswith(f"fresh {argument} ") for key in self.fresh.values())
            self.fresh[storage] = f"fresh {argument} {same}"
            self.alive.append(tensor.untyped_storage())
        return self.fresh[storage]

    def number_copy(self, made: Made, storage: int) -> str:
        """Return a key with the number of a storage among those of that key: copies keep the key of their source."""
        copies = self.copies.setdefault(made.key, [])
        if storage not in copies:
            copies.append(storage)
        at = copies.index(storage)
        key = f"{made.key} copy {at}" if at else made.key
        self.history[key] = made
        return key

    def keep(self) -> None:
        """Remember what this call made, for the case that the function keeps it."""
        self.known.kept |= self.made
        self.known.alive += self.alive
