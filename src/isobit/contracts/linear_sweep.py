"""The sweep of the linear operator: which shapes, which relations, and the control that must fail them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from isobit.contracts import transforms
from isobit.contracts.relations import RELATIONS, Problem, judge
from isobit.contracts.sabotage import SABOTAGE
from isobit.contracts.subject import STOCK, Subject
from isobit.records import Verdict

# (K, N) of the linear layers of two models; Q, K and V are one layer, gate and up another.
QWEN3_06B = {
    "0.6B qkv": (1024, 4096),
    "0.6B o": (2048, 1024),
    "0.6B gate/up": (1024, 6144),
    "0.6B down": (3072, 1024),
    "0.6B head": (1024, 151936),
}
QWEN3_8B = {
    "8B qkv": (4096, 6144),
    "8B o": (4096, 4096),
    "8B gate/up": (4096, 24576),
    "8B down": (12288, 4096),
}
DTYPES = (torch.float32, torch.bfloat16)

# Where every sabotage can show: square, several segments, a tail after the last panel of 64.
SABOTAGE_SHAPE = (1032, 1032)


def problems(full: bool) -> list[Problem]:
    """Every shape, row count and thread count; or, quickly, the small shapes at the tile edges."""
    counts = transforms.EVERY_ROW_COUNT if full else transforms.SOME_ROW_COUNTS
    shapes = QWEN3_06B | QWEN3_8B if full else {k: v for k, v in QWEN3_06B.items() if k != "0.6B head"}
    return [Problem(name, k, n, dtype, counts) for name, (k, n) in shapes.items() for dtype in DTYPES]


def sweep(subject: Subject, full: bool) -> Iterator[Verdict]:
    """A verdict per problem and relation, as each is reached."""
    for problem in problems(full):
        for relation in RELATIONS:
            yield judge(relation, subject, problem)


def control(full: bool) -> Iterator[Verdict]:
    """The same relations and shapes for stock; the tile edges are row counts enough to see it fail."""
    for problem in problems(full):
        for relation in RELATIONS:
            yield judge(relation, STOCK, replace(problem, row_counts=transforms.SOME_ROW_COUNTS))


def sweep_size(full: bool) -> int:
    """How many verdicts a sweep has."""
    return len(problems(full)) * len(RELATIONS)


def judge_sabotage() -> Iterator[tuple[str, Verdict]]:
    """Every planted kernel under the relation that must catch it, in both dtypes."""
    for dtype in DTYPES:
        for name, planted in SABOTAGE.items():
            problem = Problem("planted", *SABOTAGE_SHAPE, dtype, (1, 17, 64))
            yield f"{name}, {str(dtype).removeprefix('torch.')}", judge(planted.caught_by, planted.subject, problem)
