"""The layer of a cache that holds what linear attention carries: its state, its open chunk and the last rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.integrations.transformers.package import library
from isobit.ops.delta_rule.op import DeltaState, delta_rule
from isobit.ops.delta_rule.portable import CHUNK
from isobit.ops.share import accumulation_dtype
from isobit.order.samples import Samples


class Carried:
    """What one layer carries for each row of a batch.

    Rows that the convolution reads are kept as far back as the state's open chunk, so that tokens which the state can
    drop can be dropped here too.
    """

    is_compileable = False
    state: DeltaState | None = None
    rows: list[Tensor]  # of each sample, [K - 1 + rows of its open chunk, C]

    def prepare(self, module: Any, x: Tensor) -> None:
        """Begin with the first call, for as many samples as its batch has rows."""
        if self.state is not None:
            return
        sizes = (module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        self.state, self.batch_size = (
            DeltaState(len(x), *sizes, accumulation_dtype(x.dtype)),
            len(x),
        )
        weight = module.conv1d.weight
        empty = x.new_zeros(weight.shape[-1] - 1, len(weight))
        self.rows, self.taps = [empty] * len(x), weight.shape[-1]

    def before(self) -> Tensor:
        """Return the K - 1 rows before each sample's next, [samples, K - 1, C]."""
        return torch.stack([rows[len(rows) - self.taps + 1 :] for rows in self.rows])

    def advance(self, given: tuple[Tensor, ...], mixed: Tensor, samples: Samples | None) -> Tensor:
        """Return o of the next rows, and keep what later ones read."""
        assert self.state is not None
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if wanted and not any(self.state.counts):  # a cache that training fills and does not read
            o = delta_rule(*given, samples=samples)
            with torch.no_grad():
                delta_rule(*(t.detach() for t in given), samples=samples, state=self.state)
        else:
            o = delta_rule(*given, samples=samples, state=self.state)
        flat, width = mixed.detach().reshape(-1, mixed.shape[-1]), mixed.shape[1]
        every = [(at, width) for at in range(0, len(flat), width)]
        spans = every if samples is None else samples.spans
        for index, (start, length) in enumerate(spans):
            kept = self.taps - 1 + self.state.counts[index] % CHUNK
            rows = torch.cat((self.rows[index], flat[start : start + length]))
            self.rows[index] = rows[len(rows) - kept :].clone()
        self.has_previous_state = {0: True}
        return o

    # ---- what transformers calls on a layer of a cache ----

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of each sample; transformers passes their number below zero."""
        if self.state is not None and tokens_to_remove:
            count = abs(tokens_to_remove)
            self.state.crop(count)
            self.rows = [rows[: len(rows) - count] for rows in self.rows]

    def reset(self) -> None:
        """Forget every sample."""
        self.state, self.has_previous_state = None, {0: False}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these samples, in this order."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)
            self.rows = [self.rows[row] for row in beam_idx.tolist()]
            self.batch_size = len(self.rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples."""
        self.reorder_cache(torch.arange(len(self.rows))[indices] if self.state else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample."""
        if self.state is not None:
            self.reorder_cache(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def offload(self) -> None:
        """Stay: the state is on the CPU."""

    def prefetch(self) -> None:
        """Stay: the state is on the CPU."""

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Wait for `prepare`."""

    def update_conv_state(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("isobit's linear attention keeps its rows by `advance`")

    update_recurrent_state = update_conv_state


@lru_cache(maxsize=1)
def layer_class() -> Any:
    """Return the class of a layer that transformers' caches accept as one of linear attention."""
    stock = library("cache_utils").LinearAttentionCacheLayerMixin
    return type("DeltaLayer", (Carried, stock), {"__doc__": Carried.__doc__})
