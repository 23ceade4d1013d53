"""Linear attention by the gated delta rule in vLLM: Qwen3-Next and Qwen3.5, computed as the trainer computes them.

[Note: states in pages] vLLM gives each request one page of its cache for a layer of linear attention. isobit's state is
larger than vLLM's: besides the matrix of each head it has the rows of the open chunk of 64 tokens, by which a decoded
token reads what it would read in a prefill. So a layer asks for a page of that size, and the attention layers, whose
pages have the same size, get longer ones (`widen_pages`). A page is read where its request has earlier tokens and
taken for zeros where it has none, so pages of ended or preempted requests need no clearing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
    ChunkGatedDeltaRule,
    QwenGatedDeltaNetAttention,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

from isobit.integrations.transformers.parts.delta_net import heads_of, unit
from isobit.integrations.vllm.attention import GENERATION, refuse_old_keys
from isobit.integrations.vllm.refusals import refuse
from isobit.integrations.vllm.weights import PLAIN, Generation
from isobit.ops.causal_conv.op import causal_conv
from isobit.ops.delta_rule.gates import decay_gate, sigmoid_gate
from isobit.ops.delta_rule.op import DeltaState, delta_rule
from isobit.ops.delta_rule.portable import Sizes
from isobit.ops.portable.sums import widen
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from isobit.order.plan import ATTENTION_BLOCK
from isobit.order.samples import Samples

KIND = QwenGatedDeltaNetAttention
INSIDE = (RMSNormGated, ChunkGatedDeltaRule)  # computed by the layer, and never called


@dataclass
class DeltaStep:
    """Which tokens of a step belong to which request, for all layers of linear attention."""

    rows: int  # tokens of the step
    slots: Tensor  # [requests], the page of each request
    counts: list[int]  # earlier tokens of each request
    samples: Samples


class DeltaStepBuilder(AttentionMetadataBuilder[DeltaStep]):
    """Make the tables of a step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self._generation: Generation = getattr(layers[layer_names[0]], GENERATION)
        self._written: dict[int, int] = {}  # by page: the number of the weights that wrote it

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeltaStep:
        """Return the tables of the step that vLLM's scheduler made."""
        given = common_attn_metadata
        requests, rows = given.num_reqs, given.num_actual_tokens
        edges = given.query_start_loc_cpu[: requests + 1].long()
        lengths = edges[1:] - edges[:-1]
        counts = (given.seq_lens[:requests].long() - lengths).tolist()
        slots = given.block_table_tensor[:requests, 0].long()
        number = self._generation.number
        for slot, count in zip(slots.tolist(), counts, strict=True):
            if count and self._written.get(slot) != number:
                refuse_old_keys("state of linear attention is")
            self._written[slot] = number
        return DeltaStep(rows, slots, counts, Samples.packed(lengths.tolist()))


class DeltaBackend(AttentionBackend):
    """The backend of layers of linear attention: its name and the builder of its tables."""

    @staticmethod
    def get_name() -> str:
        return "ISOBIT_DELTA"

    @staticmethod
    def get_builder_cls() -> type[DeltaStepBuilder]:
        return DeltaStepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


def sizes_of(module: Any) -> Sizes:
    """Return the heads of a layer and their sizes."""
    return Sizes(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)


def prepare_delta_net(module: Any, generation: Generation) -> str:
    """Replace what a layer computes and keeps; return why it is not computed, or nothing."""
    norm, conv = module.norm, module.conv1d
    wrong = {
        f"the activation {module.activation!r}": module.activation not in ("silu", "swish"),
        "a bias of its convolution": conv.bias is not None,
        f"the gate {norm.activation!r}": norm.activation not in ("silu", "swish"),
        "a norm of groups": norm.group_size is not None,
        "a gate before its norm": not norm.norm_before_gate,
        "speculative tokens": bool(module.num_spec),
        "a part of the heads": module.tp_size != 1,
    }
    found = [what for what, is_there in wrong.items() if is_there]
    if found:
        return f"with {', '.join(found)}"
    shapes = ((module.conv_kernel_size - 1, module.conv_dim), (sizes_of(module).packed,))
    dtypes = (conv.weight.dtype, torch.float32)
    module.get_state_shape, module.get_state_dtype = lambda: shapes, lambda: dtypes
    module.get_attn_backend = lambda: DeltaBackend
    setattr(module, GENERATION, generation)
    module.forward = partial(forward_delta_net, module)
    return ""


def widen_pages(model: Any, attentions: list[Any], config: Any) -> None:
    """Make the pages of attention layers as large as a state at least; vLLM pads states to them.

    vLLM's own rule, which runs after the model is loaded, reads the size of its own state, and keeps longer pages.
    """
    sizes = [
        sum(
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(each.get_state_shape(), each.get_state_dtype(), strict=True)
        )
        for each in model.modules()
        if type(each) is KIND
    ]
    if not sizes:
        return
    if not attentions:
        refuse(
            "a model that has layers of softmax attention, too",
            "one of linear attention only",
            "serve Qwen3-Next or Qwen3.5",
        )
    cache, dtype = config.cache_config, config.model_config.dtype
    layer = attentions[0]
    per_token = layer.num_kv_heads * (layer.head_size + layer.head_size_v) * dtype.itemsize
    step = max(cache.block_size, ATTENTION_BLOCK)
    step = -(-step // ATTENTION_BLOCK) * ATTENTION_BLOCK
    cache.block_size = step * -(-max(sizes) // (step * per_token))


def forward_delta_net(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute a layer of the gated delta rule for the tokens of a step [rows, hidden]."""
    steps = get_forward_context().attn_metadata
    if steps is None:  # vLLM measures memory with a step of nothing
        return torch.zeros_like(hidden_states)
    step: DeltaStep = steps[module.prefix]
    x = hidden_states[: step.rows]
    mixed, z, b, a = (t.unsqueeze(0) for t in project(module, x))  # [1, rows, …]
    with PLAIN():
        conv_rows, states = module.kv_cache
        is_new = torch.tensor([count == 0 for count in step.counts])
        before = conv_rows[step.slots]  # [requests, K - 1, C]
        before[is_new] = 0
        rows = causal_conv(mixed, module.conv1d.weight.data, samples=step.samples, before=before)
        sizes, size = sizes_of(module), module.head_k_dim
        widths = [module.key_dim, module.key_dim, module.value_dim]
        q, k, v = torch.split(silu(rows), widths, -1)
        q, k = heads_of(q, size), heads_of(k, size)
        q, k = unit(q, size**-0.5, step.samples), unit(k, 1.0, step.samples)
        # As a trainer has it, which loads all weights in one dtype; vLLM keeps this one in fp32.
        rate = widen(module.A_log.data.to(module.dt_bias.dtype))
        g = decay_gate(widen(a), rate, widen(module.dt_bias.data), samples=step.samples)
        state = DeltaState(len(step.counts), *vars(sizes).values())
        state.packed, state.counts = states[step.slots], list(step.counts)
        state.packed[is_new] = 0
        given = (q, k, widen(heads_of(v, module.head_v_dim)), g, widen(sigmoid_gate(b)))
        o = delta_rule(*given, samples=step.samples, state=state)
        states[step.slots] = state.packed
        conv_rows[step.slots] = last_rows(before, mixed[0], step.samples)
        normed = rms_norm(o.to(x.dtype), module.norm.weight.data, module.norm.eps)
        mixed_heads = swiglu(z.contiguous(), normed).reshape(step.rows, -1)
    made, _ = module.out_proj(mixed_heads)
    if len(made) == len(hidden_states):
        return made  # type: ignore[no-any-return]
    output = torch.zeros_like(hidden_states)
    output[: step.rows] = made
    return output


def project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what is convolved [rows, C], the norm's gate [rows, H, Dv], and those of rate and decay [rows, H]."""
    qkvz, _ = module.in_proj_qkvz(x)
    ba, _ = module.in_proj_ba(x)
    if module.gqa_interleaved_layout:  # Qwen3-Next
        q, k, v, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([t.reshape(len(x), -1) for t in (q, k, v)], -1), z, b, a
    mixed, z = qkvz.split([2 * module.key_dim + module.value_dim, module.value_dim], -1)
    b, a = ba.chunk(2, dim=-1)
    return mixed.contiguous(), z.reshape(len(x), -1, module.head_v_dim), b, a


def last_rows(before: Tensor, rows: Tensor, samples: Samples) -> Tensor:
    """Return the last K - 1 rows of each request, of those before this step and those in it."""
    taps = before.shape[1]
    found = [
        torch.cat((earlier, rows[start : start + length]))[length : length + taps]
        for earlier, (start, length) in zip(before, samples.spans, strict=True)
    ]
    return torch.stack(found)
