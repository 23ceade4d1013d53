"""What one rank says of its parameters, asks of the others', and finds: messages apart from who carries them.

A program yields messages and is sent their answers, so that ranks may stand in one process as well. While all agree
a rank says 25 bytes. Where they do not, every rank sends its table of digests; for each parameter the value that most
ranks hold is taken for right, and the minority's first differing element is found by halving, against the lowest rank
of the majority: a place and one digest a round.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from isobit import bits
from isobit.errors import ArgumentError, UnsupportedError
from isobit.majority import count_votes
from isobit.parallel.tensor.local_shards import local_shard_of

DIGEST = 16  # bytes of BLAKE3: two different tensors share it with a chance of 2^-128
HEAD = struct.Struct("<16sBQ")
PLACE, VALUE = struct.Struct("<q"), struct.Struct("<q8s")
REFUSED, INFINITE, CHANGED = 1, 2, 4


@dataclass(frozen=True)
class Gather:
    """Answered by everyone's data, in the order of ranks; as long on each."""

    data: bytes


@dataclass(frozen=True)
class Publish:
    """Answered by one member's data, whose size all know."""

    data: bytes
    size: int
    source: int


T = TypeVar("T")
Talk = Generator[Gather | Publish, list[bytes], T]
Entry = tuple[str, str, list[int], str]  # which of the whole, dtype, shape, digest


@dataclass(frozen=True)
class Finding:
    """What a member of the group holds otherwise than `majority`, the members that hold `expected`.

    Where it is `tied` no value has most members: `majority` is the group of the lowest member among the largest.
    """

    parameter: str
    member: int
    what: str
    there: str
    expected: str
    index: tuple[int, ...] | None = None
    majority: tuple[int, ...] = ()
    tied: bool = False


@dataclass(frozen=True)
class Replica:
    """A rank's parameters, and what is known of each."""

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Entry]
    nonfinite: tuple[str, ...]
    digest: str

    @classmethod
    def of(
        cls, named: Iterable[tuple[str, Tensor]], shards: Mapping[int, Any] | None = None
    ) -> Replica:
        """Reads every element twice: for its bits, and whether it is finite."""
        tensors: dict[str, Tensor] = {}
        table: dict[str, Entry] = {}
        for name, given in named:
            piece = local_shard_of(given, shards)
            tensor = piece.local.detach()
            if tensor.layout != torch.strided or tensor.is_meta or name in tensors:
                received = (
                    "named twice" if name in tensors else f"{tensor.layout} on {tensor.device}"
                )
                raise ArgumentError(
                    expected="dense tensors with memory, each under a name of its own",
                    received=f"{name!r}, {received}",
                    remedy="leave it out",
                )
            tensors[name] = tensor
            table[name] = (piece.where, str(tensor.dtype), list(tensor.shape), bits.digest(tensor))
        if not tensors:
            raise ArgumentError(
                expected="a parameter", received="none", remedy="pass a model, or named tensors"
            )
        nonfinite = tuple(name for name, tensor in tensors.items() if not is_finite(tensor))
        return cls(
            tensors,
            table,
            nonfinite,
            blake3(json.dumps(table, sort_keys=True).encode()).hexdigest(length=DIGEST),
        )

    def wholes(self, name: str) -> Tensor:
        """The raw bits of a parameter, one whole number an element."""
        return bits.as_integers(self.tensors[name]).reshape(-1)


def is_finite(tensor: Tensor) -> bool:
    """By the extremes: an infinity is one, and a NaN becomes both."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    extremes = (plain.float() if plain.element_size() == 1 else plain).aminmax()
    return all(bool(extreme.isfinite()) for extreme in extremes)


@dataclass(frozen=True)
class Findings:
    """The same on every rank."""

    differences: tuple[Finding, ...]
    finite: bool
    changed: bool


def compare(own: Replica | Exception, member: int, changed: bool, most: int) -> Talk[Findings]:
    """A rank's program: `member` is its place in the group, `most` how many parameters are searched for the place."""
    mine = json.dumps(list(own.table.items())).encode() if isinstance(own, Replica) else b""
    if isinstance(own, Replica):
        flags = INFINITE * bool(own.nonfinite) | CHANGED * changed
        heads = yield Gather(HEAD.pack(bytes.fromhex(own.digest), flags, len(mine)))
    else:
        heads = yield Gather(HEAD.pack(b"", REFUSED, 0))
    known = [HEAD.unpack(head) for head in heads]
    if not isinstance(own, Replica):
        raise own
    refused = [at for at, (_, flags, _) in enumerate(known) if flags & REFUSED]
    if refused:
        raise UnsupportedError(
            expected="parameters that every rank can read",
            received=f"members {refused} of the group, which could not",
            remedy="see their errors",
        )
    finite = not any(flags & INFINITE for _, flags, _ in known)
    all_changed = all(flags & CHANGED for _, flags, _ in known)
    if len({digest for digest, _, _ in known}) == 1:
        return Findings((), finite, all_changed)
    texts = yield Gather(mine.ljust(max(size for _, _, size in known)))
    tables = [dict(json.loads(text)) for text in texts]
    differences = yield from _name(own, member, tables, most)
    return Findings(differences, finite, all_changed)


def _name(
    own: Replica, member: int, tables: list[dict[str, Entry]], most: int
) -> Talk[tuple[Finding, ...]]:
    """Each parameter by itself: most ranks are right, whichever those are."""
    findings: list[Finding] = []
    searched = 0
    for name in dict.fromkeys(name for table in tables for name in table):
        vote = count_votes([json.dumps(table.get(name)) for table in tables])
        if vote.is_unanimous:
            continue
        right = tables[vote.reference].get(name)
        found = [
            Finding(
                name, at, *_against(tables[at].get(name), right), None, vote.groups[0], vote.is_tied
            )
            for group in vote.groups[1:]
            for at in group
        ]
        differing = sorted(f.member for f in found if f.what == "bits")
        if differing and searched < most:
            assert right is not None
            searched += 1
            located = yield from _locate(own, member, name, right, vote.reference, differing)
            found = [replace(f, **located.get(f.member, {})) for f in found]
        findings += sorted(found, key=lambda f: f.member)
    return tuple(findings)


def _against(there: Entry | None, right: Entry | None) -> tuple[str, str, str]:
    """What differs, and both values; the values of bits are searched for."""
    if there is None or right is None:
        return ("missing", "absent", "present") if there is None else ("extra", "present", "absent")
    for what, ours, theirs in zip(("shard", "dtype", "shape"), there[:3], right[:3], strict=True):
        if ours != theirs:
            return what, str(ours), str(theirs)
    return "bits", "", ""


def _locate(
    own: Replica, member: int, name: str, entry: Entry, reference: int, differing: list[int]
) -> Talk[dict[int, dict[str, Any]]]:
    """The first differing element of each rank that differs; ranges are halved by all of them at once."""
    searching = member in differing
    shape, size = layout_of(entry)
    mine = (
        own.wholes(name) if searching or member == reference else torch.empty(0, dtype=torch.uint8)
    )
    low, width = 0, 1 << (math.prod(shape) - 1).bit_length()
    while width > 1:
        width //= 2
        places = yield from _places(low if searching else -1)
        said = b"".join(_digest(mine, at, width) for at in places) if member == reference else b""
        (digests,) = yield Publish(said, DIGEST * len(places), reference)
        if searching:
            at = DIGEST * places.index(low)
            if digests[at : at + DIGEST] == _digest(mine, low, width):
                low += width
    value = _value(mine, low) if searching else bytes(8)
    found = [
        VALUE.unpack(answer)
        for answer in (yield Gather(VALUE.pack(low if searching else -1, value)))
    ]
    places = sorted({at for at, _ in found if at >= 0})
    said = b"".join(_value(mine, at) for at in places) if member == reference else b""
    (values,) = yield Publish(said, 8 * len(places), reference)
    right = {at: values[8 * i : 8 * i + 8] for i, at in enumerate(places)}
    if any(right[at] == value for at, value in found if at >= 0):
        raise UnsupportedError(
            expected="parameters that rest while they are compared",
            received=f"{name!r}, whose digests differed and whose elements do not",
            remedy="wait for the optimizer's step, and for offloading, before the check",
        )
    return {
        at: {
            "there": _hex(value, size),
            "expected": _hex(right[place], size),
            "index": unravel(place, shape),
        }
        for at, (place, value) in enumerate(found)
        if place >= 0
    }


def layout_of(entry: Entry) -> tuple[list[int], int]:
    """The shape of a parameter's whole numbers, and their bytes: a complex number is two."""
    dtype: torch.dtype = getattr(torch, entry[1].removeprefix("torch."))
    return ([*entry[2], 2], dtype.itemsize // 2) if dtype.is_complex else (entry[2], dtype.itemsize)


def unravel(place: int, shape: list[int]) -> tuple[int, ...]:
    """A flat place as an index."""
    index: list[int] = []
    for length in reversed(shape):
        place, rest = divmod(place, length)
        index.append(rest)
    return tuple(reversed(index))


def _places(low: int) -> Talk[list[int]]:
    answers = yield Gather(PLACE.pack(low))
    return sorted({at for (at,) in map(PLACE.unpack, answers) if at >= 0})


def _digest(wholes: Tensor, at: int, width: int) -> bytes:
    return bytes.fromhex(bits.digest(wholes[at : at + width]))


def _value(wholes: Tensor, at: int) -> bytes:
    return (int(wholes[at]) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big")


def _hex(value: bytes, size: int) -> str:
    return f"0x{value[-size:].hex()}"


def compare_copies(copies: Sequence[Mapping[str, Tensor]] | Tensor, most: int = 8) -> Findings:
    """The same of copies (or of a tensor's rows) in one process: every rank's program, message by message."""
    named = [{"": copy} if isinstance(copy, Tensor) else copy for copy in copies]
    programs = [compare(Replica.of(copy.items()), at, False, most) for at, copy in enumerate(named)]
    messages = [next(program) for program in programs]
    while True:
        first = messages[0]
        data = [message.data for message in messages]
        answer = [data[first.source]] if isinstance(first, Publish) else data
        ended: list[Findings] = []
        messages = []
        for program in programs:
            try:
                messages.append(program.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            assert len(ended) == len(programs), "ranks end together"
            assert len(set(ended)) == 1, "and find the same"
            return ended[0]
