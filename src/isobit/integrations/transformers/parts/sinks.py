"""Attention sinks: a score per head that takes part in the softmax and has no value.

[Note: sinks] With lse the log-sum-exp of a query's scores and L = log(e^lse + e^sink), the result is y · e^(lse − L).
The backward of attention reads y and L in the place of y and lse: p = e^(score − L), and Σ dO·y is that of the result.
The gradient of a sink is −Σ e^(sink − L) · (dO·y) over the tokens, a sum over samples as a bias has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.attention.op import Places, check_rows_of_keys
from isobit.ops.attention.portable import Mask
from isobit.ops.linear.op import linear
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.samples import spans_of
from isobit.ops.portable.sums import round_once, widen
from isobit.ops.registration import PREFIXES, executor_of, launch
from isobit.ops.share import as_partial, check_share, gradient_dtype, share_in_force
from isobit.ops.softmax.op import softmax
from isobit.order.samples import Samples


def attend_with_sinks(
    places: Places, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Mask, samples: Samples
) -> Tensor:
    """Compute attention of [B, T, H, D] with sinks [H]; see [Note: sinks]."""
    check_share(samples, sinks)
    made: Tensor = _Sinks.apply(q, k, v, sinks, places, mask, samples)  # type: ignore[no-untyped-call]
    return made


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        places: Places,
        mask: Mask,
        samples: Samples,
    ) -> Tensor:
        shape = q.shape
        if places.crosses:
            q, k, v = (t.flatten(0, -3) for t in (q, k, v))
        where = (places.spans, places.table.starts, places.table.lengths)
        sizes = (q.shape[:-2].numel(), *q.shape[-2:], k.shape[:-2].numel(), k.shape[-2])
        how = mask.options
        y, lse = launch("attention", sizes, q, k, v, *where, *how)
        pair = torch.stack((lse, widen(sinks).to(lse.dtype).expand(lse.shape)), -1)
        share = softmax(pair)  # of the keys, and of the sink
        y = round_once(widen(y) * share[..., :1], y.dtype)
        whole = lse - log_softmax(pair)[..., 0]
        ctx.save_for_backward(q, k, v, y, whole, *where, share[..., 1], sinks)
        ctx.how, ctx.samples, ctx.share = how, samples, share_in_force()
        ctx.prefix = PREFIXES[executor_of("attention", q.dtype, (q, k, v))]
        return y.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, whole, spans, blocks, lengths, taken, sinks = ctx.saved_tensors
        if not torch.equal(spans[:, 1], lengths):
            raise UnsupportedError(
                expected="as many queries as keys in every sample",
                received="a gradient through keys of a cache, or of an earlier chunk",
                remedy="train on whole samples; a cache is for inference, under torch.no_grad()",
            )
        check_rows_of_keys(spans, blocks, lengths)
        shape, upstream = grad.shape, grad.reshape(y.shape).contiguous()
        operator = getattr(torch.ops.isobit, f"{ctx.prefix}attention_backward")
        saved = (upstream, q, k, v, y, whole, spans, blocks, lengths)
        grads = [g.reshape(shape[:-2] + g.shape[-2:]) for g in operator(*saved, *ctx.how)]
        dots = linear(widen(upstream) * widen(y), torch.ones(1, y.shape[-1], dtype=taken.dtype))
        terms = -(taken * dots[..., 0]).reshape(-1, len(sinks))
        samples = ctx.samples
        prefix = PREFIXES[executor_of("linear", terms.dtype, (terms,))]
        into = getattr(torch.ops.isobit, f"{prefix}linear_bias_grad")
        total = into(terms, spans_of(samples, terms), samples.total)
        dtype = gradient_dtype(sinks.dtype, len(samples.spans), samples.total)
        return *grads, as_partial(round_once(total, dtype), ctx.share), None, None, None
