"""Find the first module whose output changes with the batch layout, for a failed gate's report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from isobit import bits
from isobit.gates.model.batch_layouts import through_cache
from isobit.gates.model.batches import WIDTH, Batch, alone, packed, padded
from isobit.gates.model.scorers import Scorer
from isobit.integrations.transformers.structure import is_called


def first_module(scorer: Scorer, samples: list[Tensor]) -> str:
    """Return the first module, in order of execution, whose output depends on the batch layout."""
    single: dict[str, dict[int, Tensor]] = {}
    for batch in (alone(samples, i) for i in range(len(samples))):
        for name, rows in watch(scorer, batch).items():
            single.setdefault(name, {}).update(rows)
    right, left = padded(samples, "right"), padded(samples, "left")
    for batch, chunks in (
        (right, None),
        (left, None),
        (packed(samples), None),
        (left, [1] * WIDTH),
    ):
        for name, rows in watch(scorer, batch, chunks).items():
            if any(not bits.equal(rows[sample], single[name][sample]) for sample in rows):
                return name
    return "no module: what is computed from the last hidden states"


@torch.no_grad()
def watch(
    scorer: Scorer, batch: Batch, chunks: Sequence[int] | None = None
) -> dict[str, dict[int, Tensor]]:
    """Return each module's output rows by sample, in the order in which modules finished.

    The batch runs in one call, or in chunks with a cache.
    """
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) else output
            if isinstance(found, Tensor) and found.dim() > 2 and len(found) == len(batch.ids):
                seen.setdefault(name, []).append(found.clone())

        return hook

    with ExitStack() as hooks:
        for name, module in scorer.model.named_modules():
            if scorer.name == "stock" or is_called(scorer.model, module):
                hooks.callback(module.register_forward_hook(keep(name)).remove)
        if chunks is None:
            scorer.logprobs(batch, slice(0, batch.ids.shape[1]), None)
        else:
            through_cache(scorer, batch, chunks)
    return {name: batch.gather(torch.cat(parts, dim=1)) for name, parts in seen.items()}
