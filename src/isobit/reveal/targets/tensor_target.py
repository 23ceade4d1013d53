"""`TensorTarget`: a sum inside a function of tensors, whose terms are the rows of a matrix, one probe per row."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.reveal.target import BF16, FP16, FP16_DIVIDED, FP32, Scale, Terms, divided

SCALES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
TRIALS = 8
FEW_MARKS = 512
REPLAYED_PLACES = (
    64  # of one call, if there are so many: all of them would take long on subnormal terms
)
# Elements past an aligned address at which replays are stored: not aligned at all, to a vector, to a cache line.
OFFSETS = (1, 3, 8, 2, 4, 16, 5, 12, 7, 32, 9, 24)
BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11, torch.float64: 53}


def scale_of(dtype: torch.dtype) -> Scale:
    """Return the scale of terms of this dtype."""
    if dtype not in SCALES:
        raise ArgumentError(
            expected="fp32, bf16 or fp16 terms",
            received=str(dtype),
            remedy="probe one of these dtypes",
        )
    return SCALES[dtype]


@dataclass
class TensorTarget:
    """A sum inside a function of tensors.

    Only places that add like `place` are probed: those that give its bits for the same random terms.

    Attributes:
        name: what it is, for reports.
        terms: [places, n], any strides; each row holds the terms of one sum.
        run: returns [places], the sum of each row; or [places, n], where the entry at the first probed index is used.
        kind: "sum", "product" (terms times factors) or "positive" (terms that cannot be negative).
        factors: the other factor of each term, if products are summed.
        everywhere: returns all sums of a call that must have the same bits when every place has the same terms;
            without it, these are the sums of the places that add alike.
        encode: converts the value of a term to what is written.
        divided_by: the result is the sum divided by this.
        output_bits: significand bits of the result; found from its dtype if 0.
        place: the row of `terms` that is read.
        scope: which of the sums it is, if there are others.
        run_moved: like `run`, with the terms stored so many elements past an aligned address.
        storage: how the terms of replays are stored, for reports.
    """

    name: str
    terms: Tensor
    run: Callable[[], Tensor]
    kind: str = "sum"
    factors: Tensor | None = None
    everywhere: Callable[[], Tensor] | None = None
    encode: Callable[[float], float] = float
    divided_by: int = 1
    output_bits: int = 0
    place: int = 0
    scope: str = ""
    calls: int = 0
    run_moved: Callable[[int], Tensor] | None = None
    storage: str = "in the target's own tensors, aligned as allocated"
    unlike: int = field(default=0, init=False)
    _filled: tuple[float, range] = field(default=(0.0, range(0)), init=False)
    _factor: float | None = field(default=None, init=False)
    _alike: Tensor | None = field(default=None, init=False)
    _places: list[int] = field(default_factory=list, init=False)
    _cells: Any = field(default=None, init=False)
    _bits: dict[float, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Fill the terms with zeros, and find the scale and the bits of the output."""
        self.scale = scale_of(self.terms.dtype)
        if self.divided_by != 1:
            self.scale = divided(self.scale)
        self.n = self.terms.shape[1]
        self._zero = self.encode(0.0)
        if self.terms.is_contiguous():
            # The same memory as raw bits: a write takes a fiftieth of the time of an assignment to a tensor.
            kind = ctypes.c_uint32 if self.terms.dtype == torch.float32 else ctypes.c_uint16
            self._cells = (kind * self.terms.numel()).from_address(self.terms.data_ptr())
        self.terms.fill_(self._zero)
        if not self.output_bits:
            exact = self.divided_by & (self.divided_by - 1) == 0 and self.scale is not FP16_DIVIDED
            self.output_bits = BITS[self.run().dtype] if exact and self.kind != "positive" else 0

    def with_threads(self, count: int) -> TensorTarget:
        """Return the same target, each call made with `count` threads."""

        def bound(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
            def run() -> Tensor:
                before = torch.get_num_threads()
                torch.set_num_threads(count)
                try:
                    return function()
                finally:
                    torch.set_num_threads(before)

            return run

        everywhere = None if self.everywhere is None else bound(self.everywhere)
        return replace(self, run=bound(self.run), everywhere=everywhere)

    def alike(self) -> Tensor:
        """Return the places that probes may use, `place` first."""
        if self._alike is None:
            generator = torch.Generator().manual_seed(self.n)
            alike = torch.ones(len(self.terms), dtype=torch.bool)
            for trial in range(TRIALS if len(alike) > 1 else 0):
                self._write_all(self._draw(generator, wide=trial % 2 == 1), torch.ones(self.n))
                out = self.run().reshape(len(alike), -1)
                alike &= (out == out[self.place]).all(-1)
            self._clear()
            others = alike.nonzero().flatten()
            self._places = [self.place, *(p for p in others.tolist() if p != self.place)]
            self._alike = torch.tensor(self._places)
            self.unlike = len(alike) - len(self._places)
        return self._alike

    def _draw(self, generator: torch.Generator, wide: bool) -> Tensor:
        """Draw random terms; half of them negate the other half, so that the rest depends strongly on the order.

        Wide exponents make fp32 accumulators round terms of few bits, too.
        """
        values = torch.rand(self.n, generator=generator, dtype=torch.float64) + 0.5
        if self.kind == "positive":
            return torch.tensor([self.encode(v) for v in values.tolist()], dtype=torch.float64)
        if wide:
            low = min(self.scale.lowest, 30)
            values = torch.ldexp(values, torch.randint(-low, 3, (self.n,), generator=generator))
        order = torch.randperm(self.n, generator=generator)
        values[order[1::2]] = -values[order[: self.n - 1 : 2]]
        return values

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """Return the sum of each probe; a call has as many as there are rows, of one fill and factor."""
        found: list[float] = []
        for (fill, over, factor), probes in groupby(
            batch, key=lambda p: (p.fill, p.over, p.factor)
        ):
            width = len(self.alike())
            self._fill(fill, over)
            if self.factors is not None and factor != self._factor:
                self.factors.fill_(factor)
                self._factor = factor
            same = list(probes)
            for at in range(0, len(same), width):
                found += self._call(same[at : at + width], fill, over)
        return found

    def _call(self, probes: Sequence[Terms], fill: float, over: range) -> list[float]:
        lengths = [len(p.indices) for p in probes]
        columns = list(chain.from_iterable(p.indices for p in probes))
        values = list(chain.from_iterable(p.values for p in probes))
        if self._cells is not None and len(columns) <= FEW_MARKS:
            cells, usual, zero = self._cells, self._bits_of(fill), self._bits_of(0.0)
            places = zip(self._places, lengths, strict=False)
            starts = [place * self.n for place, length in places for _ in range(length)]
            for start, column, value in zip(starts, columns, values, strict=True):
                cells[start + column] = self._bits_of(value)
            read = self._run(probes)
            for start, column in zip(starts, columns, strict=True):
                cells[start + column] = usual if column in over else zero
            return read
        where = torch.tensor(columns, dtype=torch.long)
        index = (self.alike()[: len(probes)].repeat_interleave(torch.tensor(lengths)), where)
        if self.encode is not float:
            values = [self.encode(value) for value in values]
        self.terms[index] = torch.tensor(values, dtype=torch.float64).to(self.terms.dtype)
        read = self._run(probes)
        inside = (
            (where >= over.start) & (where < over.stop) & ((where - over.start) % over.step == 0)
        )
        self.terms[index] = torch.where(inside, self.encode(fill), self._zero).to(self.terms.dtype)
        return read

    def _bits_of(self, value: float) -> int:
        """Return the raw bits of a term."""
        if value not in self._bits:
            one = torch.tensor([self.encode(value)], dtype=torch.float64).to(self.terms.dtype)
            wide = self.terms.dtype == torch.float32
            signed = int(one.view(torch.int32 if wide else torch.int16).item())
            self._bits[value] = signed % (2**32 if wide else 2**16)
        return self._bits[value]

    def _run(self, probes: Sequence[Terms]) -> list[float]:
        self.calls += 1
        out = self.run()
        if out.dim() == 2:
            out = torch.stack(
                [out[place, p.indices[0]] for place, p in zip(self._places, probes, strict=False)]
            )
        elif len(out) > 1:
            out = out[self.alike()[: len(probes)]]
        out = out.double()
        if self.divided_by != 1:
            out = out * self.divided_by
            if (
                not self.output_bits
            ):  # a division by n rounded it: the sum is a whole number of units
                out = (out / self.scale.unit).round() * self.scale.unit
        values: list[float] = out.tolist()
        return values

    def _fill(self, fill: float, over: range) -> None:
        if (fill, over) == self._filled:
            return
        before = self._filled[1]
        self.terms[:, before.start : before.stop : before.step] = self._zero
        self.terms[:, over.start : over.stop : over.step] = self.encode(fill)
        self._filled = (fill, over)

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> list[float]:
        """Write the same terms to every place; return each different sum once."""
        self.alike()
        self._write_all(
            torch.tensor(values, dtype=torch.float64), torch.tensor(factors, dtype=torch.float64)
        )
        self.calls += 1
        out = self.run()[self.alike()] if self.everywhere is None else self.everywhere()
        found = self._different(out.flatten())
        self._clear()
        return found

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> list[list[float]]:
        """Write a vector to each of some evenly spread places; return each vector's different sums."""
        alike, found = self.alike(), list[list[float]]()
        places = alike[:: -(-len(alike) // max(REPLAYED_PLACES, len(batch)))]
        given = torch.tensor(batch, dtype=torch.float64).to(self.terms.dtype)
        moves = -(-4 * len(OFFSETS) // len(batch))  # every offset is used four times at least
        self._clear()
        self._write_factors(torch.tensor(factors, dtype=torch.float64))
        for call, at in enumerate(range(0, len(batch), len(places))):
            some = given[at : at + len(places)]
            which = torch.arange(len(places)) % len(some)
            self.terms[places] = some[which]
            self.calls += 1
            outs = [self.run()[places]]
            if self.run_moved is not None:
                outs += [
                    self.run_moved(OFFSETS[(call * moves + i) % len(OFFSETS)])[places]
                    for i in range(moves)
                ]
            out = torch.stack(outs)  # [storages, places]
            found += [self._different(out[:, which == i].flatten()) for i in range(len(some))]
        self._clear()
        return found

    def _different(self, sums: Tensor) -> list[float]:
        """Return each different sum once, and NaN once."""
        if bool(
            (sums == sums[0]).all()
        ):  # the usual case; avoids a list of a million equal numbers
            sums = sums[:1]
        numbers = sums[~sums.isnan()]
        found = sorted(set((numbers.double() * self.divided_by).tolist()))
        return found if len(numbers) == len(sums) else [*found, math.nan]

    def _write_all(self, values: Tensor, factors: Tensor) -> None:
        self.terms.copy_(values.to(self.terms.dtype).expand(self.terms.shape))
        self._write_factors(factors)

    def _write_factors(self, factors: Tensor) -> None:
        if self.factors is not None:
            self.factors.copy_(factors.to(self.factors.dtype).expand(self.factors.shape))
            self._factor = None

    def _clear(self) -> None:
        self.terms.fill_(self._zero)
        self._filled = (0.0, range(0))
