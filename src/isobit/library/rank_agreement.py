"""Claims of rank-agreement-v1: equal bits agree, a flipped bit is found; planted wrong comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isobit import bits
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.guards.live.comparison import ParameterDifference, ReplicaComparison, compare_copies

Copy = Mapping[str, Tensor]
Subject = Callable[[Sequence[Copy]], ReplicaComparison]
RANKS, FLIPS = 3, 4
SPECIAL = {0: 0.0, 2: float("nan")}


def copies_of(case: Case) -> list[dict[str, Tensor]]:
    """Return three ranks' copies of two parameters and a counter."""
    x = case.arguments["x"]
    turned = x.T.contiguous()
    return [{"a": x.clone(), "b": turned.clone(), "steps": torch.arange(3)} for _ in range(RANKS)]


def equal_bits_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """Copies agree, also with other strides and another order of parameters."""
    tally.count(case.rows)
    copies = copies_of(case)
    x = case.arguments["x"]
    copies[1]["a"] = x.T.contiguous().T
    copies[2]["a"] = torch.stack([x, x], -1)[..., 0]
    copies[2] = dict(reversed(copies[2].items()))
    expect(subject, copies, (), tally, "equal copies")


def names_a_flipped_bit(subject: Subject, case: Case, tally: Tally) -> None:
    """A flipped bit is found: rank, parameter and first element, also when a later element differs too."""
    tally.count(case.rows)
    generator = case.generator(71)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    for flip in range(FLIPS):
        copies = copies_of(case)
        rank, name = draw(RANKS), ("a", "b")[draw(2)]
        first, other = copies[(rank + 1) % RANKS][name], copies[rank][name]
        place = draw(other.numel())
        width = 8 * other.element_size()
        if flip in SPECIAL:  # the sign of a zero, the payload of a NaN
            for copy in copies:
                copy[name].view(-1)[place] = SPECIAL[flip]
        flip_bit(other, place, {0: width - 1, 2: 0}.get(flip, draw(width)))
        if flip % 2:
            flip_bit(other, other.numel() - 1, draw(width - 1))
        found = bits.first_difference(other, first)
        if found is None:  # the second flip undid the first
            continue
        wanted = ParameterDifference(
            name, rank, "bits", found.left, found.right, found.index, others(rank)
        )
        expect(subject, copies, (wanted,), tally, f"bit flipped at {place} of {name}, rank {rank}")


def names_other_parameters(subject: Subject, case: Case, tally: Tally) -> None:
    """Parameters that are missing, extra, of another shape or of another dtype are found."""
    tally.count(case.rows)
    copies = copies_of(case)
    del copies[1]["steps"]
    copies[2]["more"] = torch.zeros(1)
    copies[2]["b"] = copies[2]["b"].reshape(-1)
    copies[1]["a"] = copies[1]["a"].to(torch.complex64)
    shape, dtype = case.arguments["x"].T.shape, case.dtype
    wanted = (
        ParameterDifference("a", 1, "dtype", "torch.complex64", str(dtype), None, others(1)),
        ParameterDifference(
            "b", 2, "shape", str([shape.numel()]), str(list(shape)), None, others(2)
        ),
        ParameterDifference("steps", 1, "missing", "absent", "present", None, others(1)),
        ParameterDifference("more", 2, "extra", "present", "absent", None, others(2)),
    )
    expect(subject, copies, wanted, tally, "other parameters")


def says_when_there_is_no_majority(subject: Subject, case: Case, tally: Tally) -> None:
    """Of two copies that differ there is no majority: the finding names the second and is marked as a tie."""
    tally.count(case.rows)
    copies = copies_of(case)[:2]
    flip_bit(copies[0]["a"], 0, 0)
    found = bits.first_difference(copies[1]["a"], copies[0]["a"])
    assert found is not None
    wanted = ParameterDifference("a", 1, "bits", found.left, found.right, found.index, (0,), True)
    expect(subject, copies, (wanted,), tally, "two copies")


def others(rank: int) -> tuple[int, ...]:
    """Return all ranks but one."""
    return tuple(at for at in range(RANKS) if at != rank)


def expect(
    subject: Subject,
    copies: list[dict[str, Tensor]],
    wanted: tuple[ParameterDifference, ...],
    tally: Tally,
    what: str,
) -> None:
    """Compare the findings with exactly the wanted ones."""
    found = subject(copies).differences
    tally.compared += sum(tensor.numel() for copy in copies for tensor in copy.values())
    if found != wanted:
        tally.fail(f"{what}: found {found[:2]}, not {wanted[:2]}")


def flip_bit(tensor: Tensor, place: int, bit: int) -> None:
    """Flip one bit of a contiguous tensor in place."""
    bytes_of_it = tensor.view(-1).view(torch.uint8)
    bytes_of_it[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8


# ---- planted --------------------------------------------------------------------------------------------


def through(change: Callable[[Tensor], Tensor], copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare what `change` returns instead of the bits."""
    return compare_copies(
        [{name: change(tensor) for name, tensor in copy.items()} for copy in copies]
    )


def without_signs_of_zero(copies: Sequence[Copy]) -> ReplicaComparison:
    """Count -0.0 as +0.0."""
    return through(lambda t: torch.where(t == 0, torch.zeros_like(t), t), copies)


def by_sums(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare sums."""
    return through(lambda t: t.sum(), copies)


def first_element_only(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare one element per parameter."""
    return through(lambda t: t.reshape(-1)[:1], copies)


def by_storage(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare memory without strides."""
    return through(lambda t: torch.tensor([], dtype=t.dtype).set_(t.untyped_storage()), copies)


def last_difference(copies: Sequence[Copy]) -> ReplicaComparison:
    """Report the last element that differs."""
    found = through(lambda t: t.flip(tuple(range(t.dim()))), copies)
    ends = {name: [n - 1 for n in tensor.shape] for name, tensor in copies[0].items()}
    turned = tuple(
        replace(f, index=tuple(e - i for e, i in zip(ends[f.parameter], f.index, strict=True)))
        for f in found.differences
        if f.index is not None
    )
    return ReplicaComparison(turned, found.finite, found.changed)


def by_value(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare by ==: a NaN differs from itself, and -0.0 equals +0.0."""
    found = []
    for at, copy in enumerate(copies):
        for name, tensor in copy.items():
            wrong = (tensor != copies[0][name]).nonzero()
            if len(wrong):
                found.append(
                    ParameterDifference(name, at, "bits", "", "", tuple(wrong[0].tolist()))
                )
    return ReplicaComparison(tuple(found), True, False)


def those_of_the_first(copies: Sequence[Copy]) -> ReplicaComparison:
    """Ignore parameters that the first rank does not have."""
    return compare_copies([{n: t for n, t in copy.items() if n in copies[0]} for copy in copies])


def trusts_the_first(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare every rank with the first: where the first is wrong, report the others."""
    found = compare_copies(copies)
    wrong = [f for f in found.differences if f.member == 0]
    swapped = tuple(
        replace(f, member=at, there=f.expected, expected=f.there, majority=(0,))
        for f in wrong
        for at in f.majority
    )
    rest = tuple(replace(f, tied=False) for f in found.differences if f.member)
    return ReplicaComparison((*swapped, *rest), found.finite, found.changed)


def accepts_everything(copies: Sequence[Copy]) -> ReplicaComparison:
    """Report nothing."""
    return ReplicaComparison((), True, False)


def stock(copies: Sequence[Copy]) -> ReplicaComparison:
    """Compare by torch.equal, as a script would."""
    found = []
    for at, copy in enumerate(copies):
        for name, tensor in copy.items():
            if not torch.equal(tensor, copies[0][name]) and not torch.allclose(
                tensor, copies[0][name], 0, 0, equal_nan=True
            ):
                exact = bits.first_difference(tensor, copies[0][name])
                assert exact is not None
                found.append(
                    ParameterDifference(name, at, "bits", exact.left, exact.right, exact.index)
                )
    return ReplicaComparison(tuple(found), True, False)
