"""Compare two profiles brick by brick; the differences add up to the difference of the step, exactly.

Every nanosecond of a step belongs to one brick or to one reason of idle time (`Brick.wall`), so what two runs differ in
is the sum of what their bricks differ in. Runs with other numbers of steps are compared per step: all sums are of
integers, multiplied by the other run's number of steps.
"""

from __future__ import annotations

import re

from isobit.profiling.records import Comparison, Profile, RankProfile, Row

PRODUCT = re.compile(r"gemm|^Cijk_|nvjet|cutlass|wmma|gemv", re.I)


def compare_profiles(left: Profile, right: Profile) -> Comparison:
    """Compare the first ranks of two profiles; the rows are by the size of their difference, the largest first."""
    before, after = left.ranks[0], right.ranks[0]
    sides = walls_of(before), walls_of(after)
    steps = len(before.steps), len(after.steps)
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        walls = tuple(side.get(key, (0, 0, ())) for side in sides)
        if walls[0][0] or walls[1][0]:
            rows.append(Row(*key, *walls[0], *walls[1]))
    rows.sort(key=lambda row: -abs(row.right * steps[0] - row.left * steps[1]))
    return Comparison(
        names=(before.name, after.name),
        digests=(before.digest, after.digest),
        devices=(before.device, after.device),
        steps=steps,
        totals=(before.whole.total, after.whole.total),
        rows=tuple(rows),
        notes=tuple(notes_of(left, right)),
    )


def walls_of(
    rank: RankProfile,
) -> dict[tuple[str, str, str, str], tuple[int, int, tuple[str, ...]]]:
    """Return time of the steps, calls and kernels by brick, and time by reason of idle time."""
    found = {
        (brick.kind, brick.operator, brick.shapes, brick.dtypes): (
            brick.wall,
            brick.calls,
            brick.kernels,
        )
        for brick in rank.bricks
    }
    for cause, ns in rank.whole.parts.items():
        if cause.startswith("idle: "):
            found["idle", cause.removeprefix("idle: "), "", ""] = (ns, 0, ())
    return found


def notes_of(left: Profile, right: Profile) -> list[str]:
    """Say what the comparison leaves out, and whether products use other kernels."""
    notes = [
        f"of the {side} run rank {profile.ranks[0].rank} is compared, of {len(profile.ranks)} ranks"
        for side, profile in (("first", left), ("second", right))
        if len(profile.ranks) > 1
    ]
    before, after = product_kernels(left.ranks[0]), product_kernels(right.ranks[0])
    if before - after and after:
        notes.append(
            f"{len(before - after)} of {len(before)} kernels of matrix products in A are not in B, which has "
            f"{len(after)}: "
            "they may add in a different order, so that bits differ; isobit audit compares them"
        )
    return notes


def product_kernels(rank: RankProfile) -> set[str]:
    """Return the names of a rank's kernels of matrix products."""
    return {name for brick in rank.bricks for name in brick.kernels if PRODUCT.search(name)}
