"""The auxiliary loss that balances the experts of a mixture: E · Σ_e f_e · P_e.

f_e is the share of routes that go to expert e, P_e the mean of its probability, both over the tokens of all layers.
With the number of routes c_e and N rows it is E / N² · Σ_t Σ_e c_e · p_te: one exact sum, which has no order, so that
its value does not depend on padding, packing or the order of samples. It is no sum over micro-batches, because c_e is a
sum over the whole batch; a share of the batch raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import Layout
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.experts.op import route
from isobit.ops.logprob.loss import divisor
from isobit.ops.share import share_in_force
from isobit.ops.softmax.op import softmax

ROUTER_LOGITS = "router logits"  # in Layout.pending: where routers put their logits, if it is there


def wants_router_logits(module: Any, inputs: dict[str, Any]) -> bool:
    """Return whether a call asks for the loss of routers; transformers' own collector is told not to collect them."""
    asked = inputs.pop("output_router_logits", None)
    configured = getattr(module.config, "output_router_logits", False)
    if configured:
        inputs["output_router_logits"] = False
    return bool(configured if asked is None else asked)


def check_balancing(head: str) -> None:
    """Raise where the loss of routers is asked for and cannot be computed."""
    if head != "routed":
        raise UnsupportedError(
            expected="a model whose forward adds the auxiliary loss of its routers",
            received=f"output_router_logits=True, and a head that is {head}",
            remedy="set config.output_router_logits to False; read the logits of a router by a hook on it",
        )
    share = share_in_force()
    if share is not None and share.size < share.total:
        raise UnsupportedError(
            expected="the whole batch, where the auxiliary loss of routers is computed: a product of two sums over all "
            "its tokens",
            received=f"output_router_logits=True, and a share of {share.size} of {share.total} samples",
            remedy="set config.output_router_logits to False; or train the batch in one piece: one rank, and "
            "GlobalBatch(micro_batches=1)",
        )


def load_balancing_loss(
    logits: Sequence[Tensor], experts: int, top_k: int, layout: Layout
) -> Tensor:
    """Return the loss of the routers' logits, [rows, experts] of each layer, in fp32."""
    samples = layout.row_samples()
    real = torch.zeros(samples.rows, 1, dtype=torch.bool)
    for start, length in samples.spans:
        real[start : start + length] = True
    counts = torch.zeros(experts, dtype=torch.int64)
    for each in logits:
        with torch.no_grad():
            chosen = route(each.detach(), top_k, samples=samples).experts
        counts += torch.bincount(chosen.reshape(-1), minlength=experts + 1)[:experts]
    rows = len(logits) * int(real.sum())
    wide = torch.float64 if logits[0].dtype == torch.float64 else torch.float32
    factors = counts.to(wide)
    terms = [torch.where(real, softmax(each).to(wide) * factors, 0.0) for each in logits]
    total = exact_sum(torch.cat(terms))
    return total / divisor(max(rows, 1) ** 2 / experts, total)


def collected(module: Any, layout: Layout) -> tuple[Tensor, ...]:
    """Return the logits that the routers of a call left, or raise if they have lost their gradient."""
    found: list[Tensor] = layout.pending[ROUTER_LOGITS]
    if not found:
        raise UnsupportedError(
            expected="logits of at least one router",
            received="none: no layer of this model has a router",
            remedy="set config.output_router_logits to False",
        )
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if trained and not all(each.requires_grad for each in found):
        raise UnsupportedError(
            expected="routers whose logits have a gradient, where their loss is computed",
            received="logits without one: a reentrant checkpoint runs the layers without gradients, or the routers and "
            "all before them are frozen",
            remedy="gradient_checkpointing_kwargs={'use_reentrant': False}, or config.output_router_logits = False",
        )
    return tuple(found)
