"""Compare an executor's embedding with the portable one, bit for bit on ids that repeat."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.embedding import portable
from isobit.ops.portable.hard_inputs import wide_values
from isobit.order.samples import Samples

# (lengths, H): one sample of two leaves; several segments, one empty; three samples in one segment.
CASES = (((270,), 17), ((9, 0, 20, 30), 3), ((9, 30, 20), 3))
VOCABULARY, PADDING = 5, 3


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for lengths, n in CASES:
        generator = torch.Generator().manual_seed(n)
        samples = Samples.packed(lengths)
        ids = torch.randint(0, VOCABULARY, (samples.rows,), generator=generator)
        weight = wide_values((VOCABULARY, n), dtype, generator)
        grad = wide_values((samples.rows, n), dtype, generator)
        spans = torch.tensor(samples.spans)
        y = call("embedding", ids, weight, spans, PADDING)
        given = call("embedding_weight_grad", grad, ids, spans, VOCABULARY, PADDING)
        expected = portable.embedding_weight_grad(grad, ids, samples, VOCABULARY, PADDING)
        if not (bits.equal(y, portable.embedding(ids, weight)) and bits.equal(given, expected)):
            return f"embedding of samples of {list(lengths)}"
    return None
