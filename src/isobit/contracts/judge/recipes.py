"""Recipes of inputs: a few numbers that expand to many rows, so that search draws and shrinks them as one."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.language.contract import Inputs
from isobit.contracts.language.schema import EDGES, VALUES
from isobit.errors import ContractError

# Keep drawn tensors: claims of a contract, wrong subjects and both modes of a case are judged on the same ones.

MOST_BYTES = 2**29


class Drawn:
    """Tensors by key, the least used dropped first. Callers get copies: a subject may write to its arguments."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        """Keep at most so many bytes."""
        self.most, self.bytes = most, 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, draw: Callable[[], Tensor]) -> Tensor:
        """Return a copy of what `draw` gave for this key."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = draw()
            self._keep(key, found)
        return found.clone()

    def _keep(self, key: Hashable, tensor: Tensor) -> None:
        with self._lock:
            if tensor.nbytes > self.most or key in self._kept:
                return
            self._kept[key] = tensor
            self.bytes += tensor.nbytes
            while self.bytes > self.most:
                self.bytes -= self._kept.popitem(last=False)[1].nbytes


MINIMUM = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14, "float64": 2.0**-1022}
LARGEST_EDGE = {"float32": 2.0**125, "bfloat16": 2.0**125, "float16": 2.0**13, "float64": 2.0**1020}
# What `large` values are multiplied by: their exponentials overflow in every dtype, and their squares in fp16.
LARGE_SCALE = 512
DRAWN = Drawn()


@dataclass(frozen=True)
class Recipe:
    """All that is needed to build one case again."""

    inputs: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    values: str
    edge: str = ""
    seed: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self) | {"sizes": dict(self.sizes)}, separators=(",", ":"))

    def words(self) -> str:
        """Return dtype and sizes for a reader: "bfloat16, rows 33, n 64"."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes)
        return f"{self.dtype}, {sizes}{self.edge and ', ' + self.edge}"

    @staticmethod
    def parse(text: str, known: Mapping[str, Inputs]) -> Recipe:
        """Parse the output of `str`."""
        try:
            found = json.loads(text)
            sizes = tuple((str(k), int(v)) for k, v in found.pop("sizes").items())
            recipe = Recipe(sizes=sizes, **found)
            if (
                recipe.dtype not in MINIMUM
                or not isinstance(recipe.seed, int)
                or min(dict(sizes).values()) < 0
            ):
                raise ValueError("dtype, seed or sizes")
            if recipe.values not in VALUES or recipe.edge not in ("", *EDGES):
                raise ValueError("values or edge")
            if set(known[recipe.inputs].sizes) != set(dict(sizes)):
                raise ValueError(f"sizes of inputs {recipe.inputs}")
            return recipe
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ContractError(
                expected="a recipe as a broken claim printed it",
                received=f"{text!r}: {error}",
                remedy="copy it whole",
            ) from None


def fixed_recipes(name: str, inputs: Inputs, thorough: bool = False) -> Iterator[Recipe]:
    """Yield what L2 runs, small first: every dtype with every listed size, then every edge pattern."""
    sizes = {**inputs.sizes, **(inputs.thorough if thorough else {})}
    grids = sorted(
        itertools.product(*sizes.values()), key=lambda g: (sum(s == 0 for s in g), sum(g))
    )
    grids = [g for g in grids if all(g)] + [g for g in grids if not all(g)]
    for grid in grids:
        for dtype in inputs.dtypes:
            yield Recipe(name, dtype, tuple(zip(sizes, grid, strict=True)), inputs.values)
    # Where a pattern has room: the smallest listed size of at least 8, else the largest.
    least = tuple(
        (n, min((v for v in values if v >= 8), default=max(values)))
        for n, values in inputs.sizes.items()
    )
    for edge in inputs.edges:
        for dtype in inputs.dtypes:
            yield edged(Recipe(name, dtype, least, inputs.values, seed=1), edge, inputs)


def edged(recipe: Recipe, edge: str, inputs: Inputs) -> Recipe:
    """Return the recipe with an edge pattern: two of them change sizes, the others values."""
    if edge == "empty" and inputs.rows:
        return replace(
            recipe,
            edge=edge,
            sizes=tuple((n, 0 if n == inputs.rows else v) for n, v in recipe.sizes),
        )
    if edge == "single":
        last = next(iter(inputs.arguments.values()))[-1]
        return replace(
            recipe, edge=edge, sizes=tuple((n, 1 if n == last else v) for n, v in recipe.sizes)
        )
    return replace(recipe, edge=edge)


@dataclass(frozen=True)
class Case:
    """One recipe expanded to tensors."""

    recipe: Recipe
    inputs: Inputs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all arguments."""
        return getattr(torch, self.recipe.dtype)  # type: ignore[no-any-return]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(self.recipe.sizes)

    def shape_of(self, argument: str) -> tuple[int, ...]:
        """Return the shape of an argument."""
        return tuple(
            self.sizes[a] if isinstance(a, str) else int(a) for a in self.inputs.arguments[argument]
        )

    @cached_property
    def row_names(self) -> tuple[str, ...]:
        """Arguments whose first axis counts rows."""
        return tuple(
            n for n, axes in self.inputs.arguments.items() if axes and axes[0] == self.inputs.rows
        )

    @property
    def rows(self) -> int:
        """The number of independent inputs in this case."""
        return self.sizes[self.inputs.rows] if self.inputs.rows else 1

    @property
    def elements(self) -> int:
        """The number of elements of all arguments."""
        return sum(math.prod(self.shape_of(name)) for name in self.inputs.arguments)

    @cached_property
    def arguments(self) -> dict[str, Tensor]:
        """Tensors drawn by seed; the edge pattern is written over the first one."""
        found: dict[str, Tensor] = {}
        for at, name in enumerate(self.inputs.arguments):
            found[name] = self.draw(self.shape_of(name), at, self.recipe.values, at == 0)
        first = next(iter(found))
        if self.recipe.edge not in ("", "empty", "single"):
            found[first] = write_edge(found[first], self.recipe.edge, self.generator(99))
        return found

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword arguments, which are not drawn."""
        return self.inputs.options

    def generator(self, stream: int) -> torch.Generator:
        """Return a random generator of this case; streams are independent."""
        return torch.Generator().manual_seed((self.recipe.seed * 1_000_003 + stream) % 2**62)

    def draw(
        self, shape: tuple[int, ...], stream: int, values: str = "", leading: bool = True
    ) -> Tensor:
        """Draw more values of this case's kind."""
        kind = values or self.recipe.values

        def drawn() -> Tensor:
            found = draw_values(
                shape, "wide" if kind == "cancelling" else kind, self.generator(stream)
            )
            # One argument only: in fp16 products of two would overflow.
            if kind == "large" and leading:
                found = found * LARGE_SCALE
            return (cancel(found, leading) if kind == "cancelling" else found).to(self.dtype)

        key = (shape, self.recipe.dtype, self.recipe.seed, stream, kind, leading)
        return DRAWN.find(key, drawn)


def draw_values(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    """Draw values of one kind, with full mantissas."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float32)
    if kind == "wide":
        exponents = torch.randint(-6, 7, shape, generator=generator, dtype=torch.int32)
        # The powers of two by their bits: ldexp has the same result, and takes five times as long.
        return normal * ((exponents + 127) << 23).view(torch.float32)
    if kind == "logits":
        return normal * 10
    if kind == "unit":
        return torch.special.ndtr(normal)  # type: ignore[no-any-return]
    if kind == "positive":
        return torch.exp(3 * normal)
    return normal


def cancel(values: Tensor, leading: bool) -> Tensor:
    """Arrange values so that sums of products cancel and leave rounding error: see decisions/0004."""
    if values.dim() == 1:
        return values * 2.0**-20
    if leading:
        return mirror(values, -1, 1)
    return mirror(mirror(values, -1, -1), 0, -1)


def mirror(values: Tensor, axis: int, sign: int) -> Tensor:
    """Replace the second half of an axis by `sign` times the first, permuted; an odd last element is zero."""
    size = values.shape[axis]
    half = size // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(size))
    first = values.narrow(axis, 0, half)
    rest = values.narrow(axis, 2 * half, size - 2 * half) * 0
    return torch.cat([first, sign * first.index_select(axis, order), rest], axis)


def write_edge(values: Tensor, edge: str, generator: torch.Generator) -> Tensor:
    """Write a pattern that kernels often get wrong over some or all elements."""
    name = str(values.dtype).removeprefix("torch.")
    some = torch.rand(values.shape, generator=generator) < 0.3
    sign = torch.where(torch.rand(values.shape, generator=generator) < 0.5, -1.0, 1.0).to(
        values.dtype
    )
    if edge == "zeros":
        return torch.where(some, 0.0 * sign, values)
    if edge == "subnormals":
        small = (torch.rand(values.shape, generator=generator) * MINIMUM[name]).to(values.dtype)
        return torch.where(some, small * sign, values)
    if edge == "infinities":
        return torch.where(some, torch.inf * sign, values)
    if edge == "nans":
        return torch.where(some, torch.nan, values)
    if edge == "ties":
        return values.float().clamp(-2, 2).round().to(values.dtype)
    scale = LARGEST_EDGE[name] if edge == "huge" else MINIMUM[name]
    return (values.double().clamp(-4, 4) * scale).to(values.dtype)
