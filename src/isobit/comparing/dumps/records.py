"""Records of dumps and of their comparison, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from isobit.foundation.records import Difference

# How two entries were found to be the same place, the most certain first.
EXACT, NAMES, SEQUENCE, RENAMED = "exact", "names", "sequence", "renamed"
ALIGNMENTS = {
    EXACT: "same module, operator and call number",
    NAMES: "the same after normalising names",
    SEQUENCE: "same module and operator at the same place of the sequence",
    RENAMED: "same operator and shape at the same place of the sequence, another module",
}
# What two aligned entries were compared by, the strongest first.
BITS, DIGEST, HASH = "bits", "digest", "hash"


@dataclass(frozen=True)
class Stored:
    """Where a tensor's values are: a file, and the keys that lead to it inside."""

    path: Path
    keys: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Output:
    """A tensor of an entry as far as the dump describes it; `shape` is None where it is not known."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Entry:
    """One thing in a dump: the result of an operator, or a tensor with a name.

    Attributes:
        module: the path of the module, or the tensor's name.
        operator: such as `aten::mm`; empty for a tensor with a name.
        call: its number among entries with the same module, operator and tags, from 0.
        position: its number in the dump, from 0.
        tags: other things that tell entries apart, such as step and rank.
        outputs: dtype and shape of its tensors, if the dump says so.
        hashes: pairs of a path in the result and a hash as text.
        digests: the same for digests of all bits.
        stored: where its values are.
        source: file and line of its caller, if the dump says so.
    """

    module: str
    operator: str = ""
    call: int = 0
    position: int = 0
    tags: tuple[tuple[str, str], ...] = ()
    outputs: tuple[Output, ...] = ()
    hashes: tuple[tuple[str, str], ...] = ()
    digests: tuple[tuple[str, str], ...] = ()
    stored: Stored | None = None
    source: str = ""

    @property
    def name(self) -> str:
        """The operator, its module, the call number and the tags, as text."""
        where = self.module or ("" if self.operator else "a tensor")
        words = [
            f"{self.operator} in {where}" if self.operator and where else self.operator or where
        ]
        words += [f"{key}={value}" for key, value in self.tags]
        return " ".join([*words, f"call {self.call}"] if self.call or self.operator else words)


@dataclass(frozen=True)
class Unreadable:
    """A file, or lines of it, that could not be read, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class Dump:
    """All entries of one dump.

    Attributes:
        path: the file or folder.
        format: "DebugMode text", "DebugMode JSON lines", "SGLang dumper" or "tensor files".
        entries: in the order of the run, or of their names if `ordered` is False.
        ordered: whether the order is the order of the run.
        unreadable: what could not be read.
    """

    path: Path
    format: str
    entries: tuple[Entry, ...]
    ordered: bool = True
    unreadable: tuple[Unreadable, ...] = ()


@dataclass(frozen=True)
class PlaceDifference:
    """A place at which two runs differ.

    Attributes:
        left: the place, as the left dump names it.
        right: as the right dump names it.
        alignment: how the two were found to be the same place, a key of `ALIGNMENTS`.
        what: "bits", "digest", "hash", "shape", "dtype", "value" or "outputs".
        detail: how they differ, in words.
        difference: the first element that differs, where values were compared.
        ulps: the largest distance in units in the last place; None where there is none.
        largest: the largest |difference|; None where it is not known or not finite.
        source: file and line of the caller, if a dump has it.
        position: its number in the left dump.
    """

    left: str
    right: str
    alignment: str
    what: str
    detail: str
    difference: Difference | None = None
    ulps: int | None = None
    largest: float | None = None
    source: str = ""
    position: int = 0


@dataclass(frozen=True)
class NotCompared:
    """Two aligned entries that could not be compared, and why."""

    left: str
    right: str
    reason: str


@dataclass(frozen=True)
class DumpComparison:
    """The comparison of two dumps.

    Attributes:
        left: path of the left dump.
        right: path of the right dump.
        formats: the formats of both.
        entries: how many entries each has.
        rows: "all", or "common" if only rows that both sides have were compared.
        ordered: whether `first` is the first of the run; otherwise the first by name.
        aligned: pairs by the way they were aligned, see `ALIGNMENTS`.
        compared: pairs by what they were compared by: "bits", "digest" or "hash".
        shortened: pairs of which only the common rows were compared.
        without_values: aligned pairs for which neither dump has anything to compare.
        differing: places that differ, in the order of the left dump.
        not_compared: aligned pairs that could not be compared, and why.
        before_first: entries without a partner between the first difference and the pair before it: a run that
            computes something in another way differs there first.
        only_left: entries of the left dump without a partner.
        only_right: entries of the right dump without a partner.
        unreadable: what could not be read.
        notes: what limits the result, as sentences.
    """

    left: str
    right: str
    formats: tuple[str, str]
    entries: tuple[int, int]
    rows: str = "all"
    ordered: bool = True
    aligned: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    shortened: int = 0
    without_values: int = 0
    differing: tuple[PlaceDifference, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    before_first: tuple[str, ...] = ()
    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> PlaceDifference | None:
        """The first place that differs, in the order of the left dump."""
        return self.differing[0] if self.differing else None

    @property
    def pairs(self) -> int:
        """How many entries were aligned."""
        return sum(self.aligned.values())

    @property
    def exit_code(self) -> int:
        """0 if no difference was seen, 1 if the dumps differ, 2 if too little could be compared to say.

        Entries without a partner are a difference of the dumps.
        """
        if self.differing:
            return 1
        if not sum(self.compared.values()) or self.unreadable or self.not_compared:
            return 2
        return 1 if self.only_left or self.only_right else 0
