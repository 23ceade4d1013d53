"""Which module first gives a sample other bits when its batch changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.chain.fixture import Batch
from isobit.chain.scorers import Scorer


def first_module(scorer: Scorer, single: Sequence[Batch], together: Sequence[Batch]) -> str:
    """The first module, in order of execution, whose rows differ in the first batch that shows any; else empty."""
    apart: dict[str, dict[int, Tensor]] = {}
    for batch in single:
        for name, rows in watch(scorer, batch).items():
            apart.setdefault(name, {}).update(rows)
    for batch in together:
        for name, rows in watch(scorer, batch).items():
            if any(not bits.equal(rows[sample], apart[name][sample]) for sample in rows):
                return name
    return ""


@torch.no_grad()
def watch(scorer: Scorer, batch: Batch) -> dict[str, dict[int, Tensor]]:
    """By module, in the order they ended: its output's rows of each sample."""
    seen: dict[str, dict[int, Tensor]] = {}
    shape = tuple(batch.ids.shape)

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) else output
            if isinstance(found, Tensor) and tuple(found.shape[:2]) == shape:
                seen[name] = {sample: rows.clone() for sample, rows in batch.gather(found).items()}

        return hook

    with ExitStack() as hooks:
        for name, module in scorer.model.named_modules():
            hooks.callback(module.register_forward_hook(keep(name)).remove)
        scorer.logprobs(batch, slice(0, shape[1]), None)
    return seen
