"""vLLM's attention backend ISOBIT: isobit.attention over vLLM's paged cache.

[Note: pages and blocks] isobit folds keys in blocks of 64 at absolute positions of their sample. A page of vLLM that
is a multiple of 64 long holds whole blocks, so that the operator reads the cache in place: only a table of where each
block begins is made, once per step. Pages of another length are gathered into rows of their own first, and so are those
of a dtype that the engine converts: it would convert the whole cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from isobit.integrations.vllm.refusals import refuse
from isobit.integrations.vllm.weights import Generation
from isobit.ops import dispatch
from isobit.ops.registration import launch
from isobit.order.plan import ATTENTION_BLOCK

GENERATION = "_isobit_generation"  # on an Attention layer: the number of the model's weights


def is_read_in_place(dtype: torch.dtype) -> bool:
    """Return whether the engine computes in this dtype, so that keys are not converted first."""
    if dtype == torch.float32:
        return True
    return dtype == torch.bfloat16 and dispatch.has_native() and torch.ops.isobit.pairs_bf16()


class OrderedAttentionBackend(AttentionBackend):
    """The backend's name, classes and the layout of its cache."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "float32"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "ISOBIT"

    @staticmethod
    def get_impl_cls() -> type[OrderedAttention]:
        return OrderedAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Tokens before heads, so that the rows of a page are evenly spaced."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


@dataclass
class Step:
    """What one step attends to, for all layers."""

    rows: int  # tokens of the step
    slots: Tensor  # [rows], the cache row of each new key
    spans: Tensor  # [requests, 2], first row and number of rows of each request's queries
    starts: Tensor  # [requests, blocks], the row at which each block of 64 keys begins
    lengths: Tensor  # [requests], keys of each request, the new ones included
    gathered: Tensor | None  # cache rows to bring together first, where they are not read in place
    is_decode: bool  # one query per request


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Make the tables of a step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._page = int(kv_cache_spec.block_size)
        # Pages that a sliding window has left are freed: another request's, or nobody's, are in their place.
        self._window = getattr(kv_cache_spec, "sliding_window", None)
        self._in_place = self._page % ATTENTION_BLOCK == 0 and is_read_in_place(kv_cache_spec.dtype)
        layers = vllm_config.compilation_config.static_forward_context
        self._generation: Generation = getattr(layers[layer_names[0]], GENERATION)
        self._written = torch.empty(0, dtype=torch.int64)  # per page: the weights that wrote it

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """Return the tables of the step that vLLM's scheduler made."""
        given = common_attn_metadata
        if given.causal is not True:
            refuse("causal attention", f"causal={given.causal!r}", "serve a decoder")
        requests, rows = given.num_reqs, given.num_actual_tokens
        edges = given.query_start_loc_cpu[: requests + 1].long()
        spans = torch.stack((edges[:-1], edges[1:] - edges[:-1]), dim=1)
        lengths = given.seq_lens[:requests].long()
        pages = given.block_table_tensor[:requests].long()
        slots = given.slot_mapping[:rows].long()
        if not requests or bool((slots < 0).any()):
            refuse("a step without padding", "rows without a place in the cache", "run eagerly")
        self._check_generation(pages, lengths - spans[:, 1], slots)
        starts, gathered = self._find_blocks(pages, lengths)
        return Step(rows, slots, spans, starts, lengths, gathered, rows == requests)

    def _find_blocks(self, pages: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return where blocks begin, and the rows to gather first, if any."""
        blocks = -(-int(lengths.max()) // ATTENTION_BLOCK)
        first = torch.arange(blocks) * ATTENTION_BLOCK  # positions
        if self._in_place:
            # A request shorter than the longest has pages that are not its own at the end: they are not read.
            starts = pages[:, first // self._page] * self._page + first % self._page
            return starts.contiguous(), None
        ends = lengths.cumsum(0)
        begins = ends - lengths
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(int(ends[-1])) - begins[owner]
        rows = pages[owner, place // self._page] * self._page + place % self._page
        return torch.where(first < lengths[:, None], begins[:, None] + first, 0), rows

    def _check_generation(self, pages: Tensor, computed: Tensor, slots: Tensor) -> None:
        """Raise if keys of a request were computed with other weights; see [Note: keys of older weights]."""
        number = self._generation.number
        highest = int(max(pages.max(), slots.max() // self._page)) + 1
        if len(self._written) < highest:
            grown = torch.full((max(highest, 2 * len(self._written)),), -1)
            grown[: len(self._written)] = self._written
            self._written = grown
        first = torch.arange(pages.shape[1]) * self._page
        used = first < computed[:, None]
        if self._window is not None:  # the first new token sees the keys of its window
            used &= first + self._page > computed[:, None] + 1 - self._window
        if bool((self._written[pages[used]] != number).any()):
            refuse_old_keys("cached keys are")
        self._written[slots // self._page] = number


def refuse_old_keys(what: str) -> NoReturn:
    """Raise for a request that would go on behind what other weights computed."""
    refuse(
        "keys that were computed with the present weights",
        f"a request whose {what} older than the last update of the weights",
        "call llm.reset_prefix_cache() after each update, when no request is running",
    )


class OrderedAttention(AttentionImpl[Step]):
    """Write new keys and values to the cache, and attend to it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **other: Any,
    ) -> None:
        given = {
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            **other,
        }
        for name, value in given.items():
            if value is not None:
                refuse(
                    "causal attention to all keys, or to a window of them",
                    f"{name}={value!r}",
                    "serve a model without it",
                )
        if attn_type != AttentionType.DECODER:
            refuse("a decoder's attention", f"attn_type={attn_type!r}", "serve a decoder")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window = 0 if sliding_window is None else int(sliding_window)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from the new tokens [rows, H, D] to all keys of their requests."""
        if attn_metadata is None:  # vLLM measures memory with a step of nothing
            return output.zero_()
        step = attn_metadata
        pages, heads, page, depth = kv_cache.shape  # logical; in memory tokens are before heads
        cache = kv_cache.transpose(1, 2).view(pages * page, heads, depth)
        keys, values = cache[..., : self.head_size], cache[..., self.head_size :]
        keys[step.slots] = key[: step.rows]
        values[step.slots] = value[: step.rows]
        if step.gathered is not None:
            keys, values = keys[step.gathered], values[step.gathered]
        q = query[: step.rows]
        sizes = (*q.shape, *keys.shape[:2])
        mixed, _ = launch(
            "attention",
            sizes,
            q,
            keys,
            values,
            step.spans,
            step.starts,
            step.lengths,
            self.scale,
            True,
            self.window,
        )
        output[: step.rows] = mixed
        return output
