"""The sweep of the linear operator: which shapes, which relations, and the control that must fail them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


LAYERS = QWEN3_06B | QWEN3_8B
QUICK_LAYERS = tuple(name for name in QWEN3_06B if name != "0.6B head")


def problems(layers: Sequence[str], every_row_count: bool) -> list[Problem]:
    """The layers whose names start so, at every row count from 1 to 257 or at the tile edges."""
    counts = transforms.EVERY_ROW_COUNT if every_row_count else transforms.SOME_ROW_COUNTS
    chosen = {name: shape for name, shape in LAYERS.items() if name.startswith(tuple(layers))}
    return [Problem(name, k, n, dtype, counts) for name, (k, n) in chosen.items() for dtype in DTYPES]


def sweep(subject: Subject, chosen: Sequence[Problem]) -> Iterator[Verdict]:
    """A verdict per problem and relation, as each is reached."""
    for problem in chosen:
        for relation in RELATIONS:
            yield judge(relation, subject, problem)


def control(chosen: Sequence[Problem]) -> Iterator[Verdict]:
    """The same relations and shapes for stock; the tile edges are row counts enough to see it fail."""
    return sweep(STOCK, [replace(problem, row_counts=transforms.SOME_ROW_COUNTS) for problem in chosen])


def judge_sabotage() -> Iterator[tuple[str, Verdict]]:
    """Every planted kernel under the relation that must catch it, in both dtypes."""
    for dtype in DTYPES:
        for name, planted in SABOTAGE.items():
            problem = Problem("planted", *SABOTAGE_SHAPE, dtype, (1, 17, 64))
            yield f"{name}, {str(dtype).removeprefix('torch.')}", judge(planted.caught_by, planted.subject, problem)
