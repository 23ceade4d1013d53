"""Linear attention by the gated delta rule: projections, a short convolution, gates, the rule and a gated norm.

The module's own children are called (projections, norm, output), so that their hooks run. Its code is not run: it
chooses between two orders, by the number of new tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.layers import NormFormula, norm_of_heads
from isobit.integrations.transformers.refusals import refuse
from isobit.ops.causal_conv.op import causal_conv
from isobit.ops.delta_rule.gates import decay_gate, sigmoid_gate
from isobit.ops.delta_rule.op import DeltaState, delta_rule
from isobit.ops.delta_rule.portable import CHUNK
from isobit.ops.portable.sums import widen
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import accumulation_dtype
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu
from isobit.order.samples import Samples

# The layer of a cache that holds what linear attention carries: its state, its open chunk and the last rows.


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


UNIT_EPS = 1e-6  # of the norm of queries and keys


def forward_delta_net(
    module: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute a layer of the gated delta rule; `attention_mask` is in the layout."""
    samples = current_layout().samples
    mixed, z, b, a = project(module, hidden_states)
    held = None if cache_params is None else carried(cache_params, module, hidden_states, samples)
    before = None if held is None else held.before()
    rows = causal_conv(mixed, module.conv1d.weight, samples=samples, before=before)
    q, k, v = torch.split(silu(rows), [module.key_dim, module.key_dim, module.value_dim], -1)
    q, k = (heads_of(t, module.head_k_dim) for t in (q, k))
    size = module.head_k_dim
    q, k = unit(q, size**-0.5, samples), unit(k, 1.0, samples)
    beta = widen(sigmoid_gate(b))
    if module.A_log.dtype == torch.float32:  # which checkpoints may keep where the rest has 16 bits
        a = a.float()
    g = decay_gate(a, module.A_log, module.dt_bias, samples=samples)
    given = (q, k, widen(heads_of(v, module.head_v_dim)), g, beta)
    o = delta_rule(*given, samples=samples) if held is None else held.advance(given, mixed, samples)
    normed = module.norm(o.to(hidden_states.dtype), z)
    return module.out_proj(normed.reshape(*hidden_states.shape[:2], -1))  # type: ignore[no-any-return]


def project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what is convolved [B, T, C], the norm's gate [B, T, H, Dv], and those of rate and decay [B, T, H]."""
    if hasattr(module, "in_proj_qkvz"):
        both = module.in_proj_qkvz(x), module.in_proj_ba(x)
        q, k, v, z, b, a = module.fix_query_key_value_ordering(*both)
        return torch.cat([t.reshape(*x.shape[:2], -1) for t in (q, k, v)], -1), z, b, a
    mixed, z = module.in_proj_qkv(x), module.in_proj_z(x)
    return mixed, heads_of(z, module.head_v_dim), module.in_proj_b(x), module.in_proj_a(x)


def heads_of(x: Tensor, size: int) -> Tensor:
    """Return [B, T, heads, size]."""
    return x.reshape(*x.shape[:2], -1, size)


def unit(x: Tensor, scale: float, samples: Samples | None) -> Tensor:
    """Return x / sqrt(Σ x² + eps) · scale of each head in fp32: RMSNorm with eps and the weight for a mean."""
    size, wide = x.shape[-1], widen(x)
    weight = torch.full((size,), size**-0.5 * scale, dtype=wide.dtype, device=x.device)
    return rms_norm(wide, weight, UNIT_EPS / size, samples=samples, heads=True)


def carried(cache: Any, module: Any, x: Tensor, samples: Samples | None) -> Carried:
    """Return the layer of a cache that holds the state of this module."""
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if not isinstance(layer, Carried):
        raise UnsupportedError(
            expected="a cache that was empty when isobit's model first got it, and has a layer for linear attention",
            received=f"{type(cache).__name__} with {type(layer).__name__} as layer {module.layer_idx}",
            remedy="pass transformers.DynamicCache(config=model.config), new for each batch",
        )
    count = x.shape[0] if samples is None else len(samples.spans)
    if count != x.shape[0]:
        refuse(
            "one sample in each row of the batch behind a cache", f"{count}", "leave packing out"
        )
    layer.prepare(module, x)
    return layer


def forward_gated_norm(formula: NormFormula, module: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Compute norm(x) · silu(gate) of heads [B, T, H, n]."""
    return swiglu(gate.contiguous(), norm_of_heads(formula, module, x))


def check_delta_net(name: str, module: Any) -> None:
    """Raise unless a layer convolves without bias and with silu."""
    conv = module.conv1d
    plain = (
        conv.bias is None
        and conv.groups == conv.in_channels == conv.out_channels
        and conv.stride == conv.dilation == (1,)
        and conv.padding == (conv.kernel_size[0] - 1,)
        and conv.padding_mode == "zeros"
    )
    if not plain or module.activation not in ("silu", "swish"):
        refuse(
            "a causal convolution of each channel without bias, then silu",
            f"{name} with {conv} and {module.activation}",
            "it is not supported: set hidden_act to 'silu' and conv1d.bias to None, if the model allows",
        )
