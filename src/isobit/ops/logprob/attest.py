"""Compare an executor's linear_logprob with the portable one, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.logprob import portable
from isobit.ops.portable.hard_inputs import wide_values
from isobit.order.samples import Samples

VOCABULARY, WIDTH, ROWS = 1026, 16, 3  # two segments, each with a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(WIDTH)
    hidden, weight = (wide_values((n, WIDTH), dtype, generator) for n in (ROWS, VOCABULARY))
    targets, grad = (
        torch.tensor([0, VOCABULARY - 1, -100]),
        torch.tensor([1.0, -0.3, 2.0], dtype=torch.float32),
    )
    samples = Samples.packed([ROWS])
    spans = torch.tensor(samples.spans)
    found, stats = call("linear_logprob", hidden, weight, targets, 0.7, spans)
    given = call(
        "linear_logprob_backward", grad, hidden, weight, targets, stats, spans, 0.7, True, True
    )
    known = portable.linear_logprob(hidden, weight, targets, 0.7)
    grads = portable.linear_logprob_backward(grad, hidden, weight, targets, stats, samples, 0.7)
    pairs = [(found, known[0]), (stats, known[1]), *zip(given, grads, strict=True)]
    for name, (left, right) in zip(("values", "sums", "dhidden", "dweight"), pairs, strict=True):
        if not bits.equal(left, right):
            return f"linear_logprob's {name}"
    return None
