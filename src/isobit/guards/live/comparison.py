"""The protocol by which ranks compare their parameters, independent of the transport.

[Note: how ranks compare parameters]
The program of a rank (`compare`) is a generator: it yields messages, and is sent the replies. `agreement.py` exchanges
them over torch.distributed, `compare_copies` within one process.

1. Every rank sends 25 bytes: the digest of all its parameters, flags, and the size of its table of digests. If the
   digests are equal, this is all.
2. Otherwise every rank sends its table. For each parameter, the value of the largest group of ranks is taken as right.
3. The first wrong element of the other ranks is found by binary search against the lowest rank of that group: each
   round, the ranks send the start of the range that they are at, and that rank replies with a digest per range.
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
from isobit.foundation.majority import count_votes
from isobit.parallel.tensor.shard import local_shard_of

# The parameters of one rank as they are compared: digests, dtypes, shapes, and whether they are finite.

DIGEST = 16  # bytes of BLAKE3; two different tensors have the same with a probability of 2^-128
Entry = tuple[str, str, list[int], str]  # shard, dtype, shape, digest


@dataclass(frozen=True)
class Replica:
    """The parameters of a rank.

    Attributes:
        tensors: Each parameter, or the rank's shard of it.
        table: What is compared of each.
        nonfinite: Parameters that have a NaN or an infinity.
        digest: The digest of the table.
    """

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Entry]
    nonfinite: tuple[str, ...]
    digest: str

    @classmethod
    def of(
        cls, named: Iterable[tuple[str, Tensor]], shards: Mapping[int, Any] | None = None
    ) -> Replica:
        """Read every parameter: its digest, and whether it is finite."""
        tensors: dict[str, Tensor] = {}
        table: dict[str, Entry] = {}
        for name, given in named:
            shard = local_shard_of(given, shards)
            tensor = shard.local.detach()
            if tensor.layout != torch.strided or tensor.is_meta or name in tensors:
                received = (
                    "named twice" if name in tensors else f"{tensor.layout} on {tensor.device}"
                )
                raise ArgumentError(
                    expected="dense tensors that are not on the meta device, each with a unique name",
                    received=f"{name!r}, {received}",
                    remedy="leave this tensor out",
                )
            tensors[name] = tensor
            table[name] = (shard.where, str(tensor.dtype), list(tensor.shape), bits.digest(tensor))
        if not tensors:
            raise ArgumentError(
                expected="a parameter",
                received="none",
                remedy="pass a model with parameters, or named tensors",
            )
        nonfinite = tuple(name for name, tensor in tensors.items() if not is_finite(tensor))
        return cls(
            tensors,
            table,
            nonfinite,
            blake3(json.dumps(table, sort_keys=True).encode()).hexdigest(length=DIGEST),
        )

    def wholes(self, name: str) -> Tensor:
        """Return the raw bits of a parameter as one integer per element."""
        return bits.as_integers(self.tensors[name]).reshape(-1)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity, from its minimum and maximum."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    extremes = (plain.float() if plain.element_size() == 1 else plain).aminmax()
    return all(bool(extreme.isfinite()) for extreme in extremes)


HEAD = struct.Struct("<16sBQ")
PLACE, VALUE = struct.Struct("<q"), struct.Struct("<q8s")
FAILED, INFINITE, CHANGED = 1, 2, 4  # flags of step 1


@dataclass(frozen=True)
class Gather:
    """An all-gather: the reply is the data of every member, in order, of equal length."""

    data: bytes


@dataclass(frozen=True)
class Publish:
    """A broadcast: the reply is the data of member `source`, whose size all members know."""

    data: bytes
    size: int
    source: int


T = TypeVar("T")
Talk = Generator[Gather | Publish, list[bytes], T]


@dataclass(frozen=True)
class ParameterDifference:
    """A parameter of one member that differs from the majority.

    The attributes are those of `Disagreement`, with members of the group in place of ranks.
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
class ReplicaComparison:
    """What a comparison found; equal on every rank."""

    differences: tuple[ParameterDifference, ...]
    finite: bool
    changed: bool


def compare(
    own: Replica | Exception, member: int, changed: bool, most: int
) -> Talk[ReplicaComparison]:
    """Run the program of one rank; see [Note: how ranks compare parameters].

    Args:
        own: The parameters of the rank, or the error on reading them.
        member: The index of the rank in the group.
        changed: Whether the rank's parameters have changed since the previous check.
        most: The number of parameters whose first wrong element is searched for.
    """
    mine = json.dumps(list(own.table.items())).encode() if isinstance(own, Replica) else b""
    if isinstance(own, Replica):
        flags = INFINITE * bool(own.nonfinite) | CHANGED * changed
        heads = yield Gather(HEAD.pack(bytes.fromhex(own.digest), flags, len(mine)))
    else:
        heads = yield Gather(HEAD.pack(b"", FAILED, 0))
    known = [HEAD.unpack(head) for head in heads]
    if not isinstance(own, Replica):
        raise own
    failed = [at for at, (_, flags, _) in enumerate(known) if flags & FAILED]
    if failed:
        raise UnsupportedError(
            expected="parameters that every rank can read",
            received=f"an error on members {failed} of the group",
            remedy="look at the errors of these members",
        )
    finite = not any(flags & INFINITE for _, flags, _ in known)
    all_changed = all(flags & CHANGED for _, flags, _ in known)
    if len({digest for digest, _, _ in known}) == 1:
        return ReplicaComparison((), finite, all_changed)
    texts = yield Gather(mine.ljust(max(size for _, _, size in known)))
    tables = [dict(json.loads(text)) for text in texts]
    differences = yield from _name(own, member, tables, most)
    return ReplicaComparison(differences, finite, all_changed)


def _name(
    own: Replica, member: int, tables: list[dict[str, Entry]], most: int
) -> Talk[tuple[ParameterDifference, ...]]:
    """Find the members that differ from the majority, parameter by parameter."""
    findings: list[ParameterDifference] = []
    searched = 0
    for name in dict.fromkeys(name for table in tables for name in table):
        vote = count_votes([json.dumps(table.get(name)) for table in tables])
        if vote.is_unanimous:
            continue
        right = tables[vote.reference].get(name)
        found = [
            ParameterDifference(
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
    """Return what differs, and both values; bits are searched for later."""
    if there is None or right is None:
        return ("missing", "absent", "present") if there is None else ("extra", "present", "absent")
    for what, ours, theirs in zip(("shard", "dtype", "shape"), there[:3], right[:3], strict=True):
        if ours != theirs:
            return what, str(ours), str(theirs)
    return "bits", "", ""


def _locate(
    own: Replica, member: int, name: str, entry: Entry, reference: int, differing: list[int]
) -> Talk[dict[int, dict[str, Any]]]:
    """Find the first wrong element of each member in `differing`, by one binary search for all of them."""
    searching = member in differing
    shape, size = layout_of(entry)
    mine = (
        own.wholes(name) if searching or member == reference else torch.empty(0, dtype=torch.uint8)
    )
    low, width = 0, 1 << (math.prod(shape) - 1).bit_length()
    while width > 1:
        width //= 2
        places = yield from _places(low if searching else -1)
        data = b"".join(_digest(mine, at, width) for at in places) if member == reference else b""
        (digests,) = yield Publish(data, DIGEST * len(places), reference)
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
    data = b"".join(_value(mine, at) for at in places) if member == reference else b""
    (values,) = yield Publish(data, 8 * len(places), reference)
    right = {at: values[8 * i : 8 * i + 8] for i, at in enumerate(places)}
    if any(right[at] == value for at, value in found if at >= 0):
        raise UnsupportedError(
            expected="parameters that do not change during the check",
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
    """Return the shape of a parameter's integers and their size in bytes; a complex number is two."""
    dtype: torch.dtype = getattr(torch, entry[1].removeprefix("torch."))
    return ([*entry[2], 2], dtype.itemsize // 2) if dtype.is_complex else (entry[2], dtype.itemsize)


def unravel(place: int, shape: list[int]) -> tuple[int, ...]:
    """Convert a flat index into one of the shape."""
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


def compare_copies(
    copies: Sequence[Mapping[str, Tensor]] | Tensor, most: int = 8
) -> ReplicaComparison:
    """Compare copies, or the rows of a tensor, as ranks would, in one process.

    Args:
        copies: Named tensors per member, or a tensor with one row per member.
        most: The number of parameters whose first wrong element is searched for.
    """
    named = [{"": copy} if isinstance(copy, Tensor) else copy for copy in copies]
    programs = [compare(Replica.of(copy.items()), at, False, most) for at, copy in enumerate(named)]
    messages = [next(program) for program in programs]
    while True:
        first = messages[0]
        data = [message.data for message in messages]
        answer = [data[first.source]] if isinstance(first, Publish) else data
        ended: list[ReplicaComparison] = []
        messages = []
        for program in programs:
            try:
                messages.append(program.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            assert len(ended) == len(programs), "ranks must end together"
            assert len(set(ended)) == 1, "ranks must find the same"
            return ended[0]
