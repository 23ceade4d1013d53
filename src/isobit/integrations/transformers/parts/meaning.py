"""Compare an enabled model with its own stock forward, where the source of one of its classes was not read before.

Strict mode shows that nothing else added; it does not show that the formula is the model's. A head that forgets a scale
is equal in every batch, and another function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.parts.recognition import Plan

TOKENS = 8
# Largest difference, relative to the largest element: of sums in another order, and of more or fewer roundings.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@torch.no_grad()
def score_tokens(plan: Plan) -> Tensor | None:
    """Return the output of a model, as it is now, for eight tokens in eval mode; None on the meta device."""
    model: Any = plan.model
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return None
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        count = int(getattr(model.config, "vocab_size", TOKENS))
        ids = (torch.arange(TOKENS, device=first.device) * 7 + 3)[None] % max(count, 1)
        found = model(input_ids=ids, use_cache=False)
        output: Tensor = found.last_hidden_state if plan.head is None else found.logits
        return output.float()
    finally:
        for module in training:
            module.training = True


def compare_with_stock(plan: Plan, stock: Tensor) -> None:
    """Raise if the enabled model computes another function than it did before."""
    found = score_tokens(plan)
    assert found is not None
    dtype = next(plan.model.parameters()).dtype
    scale = stock.abs().max().item() or 1.0
    apart = (found - stock).abs().max().item() / scale
    if not apart <= TOLERANCES.get(dtype, 1e-3):
        raise UnsupportedError(
            expected="the function that the model computes without isobit, on eight tokens",
            received=f"another one: the largest difference is {apart:.3g} of the largest "
            f"{'hidden state' if plan.head is None else 'logit'}; not read before: {', '.join(plan.unshipped)}",
            remedy="register the formula of the class that was recognised wrongly: isobit.parts.register(cls, …)",
        )
