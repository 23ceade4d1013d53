"""The portable executors with the products of a tensor core: the order of a GPU in bf16, without any kernel.

Where the portable executors have a chain of multiply-adds, this has the chain of the engine's steps over operands that
are rounded to bf16 first. Everything else is theirs. It is the order of a GPU for segments of up to 256 features: a
longer one is one leaf on a tensor core, and several in the portable executors.
"""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from isobit.certifying.names.leaf import multiply_accumulate
from isobit.ops import dispatch
from isobit.ops.attention import portable as attention
from isobit.ops.portable import sums
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.order.plan import Leaf


def raw(tensor):
    """Return the patterns of values that are rounded to bf16."""
    return tensor.detach().bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


class Products:
    """Products [R, k] · [C, k] of one engine."""

    def __init__(self, engine):
        self.engine = engine

    def of_leaf(self, leaf, left, right):
        run = slice(leaf.start, leaf.start + leaf.length)
        start = np.zeros((len(left), len(right)), np.float32)
        found = multiply_accumulate(
            raw(left[:, run]), raw(right[:, run]), start, self.engine, "bf16"
        )
        return torch.from_numpy(found)

    def add(self, fold, first, k, v):
        """Add one block of keys, as Fold.add; weights of keys that are not seen are +0."""
        if fold.begins_chunk(first):
            fold._earlier, fold._chunk = fold.state, attention.State.empty(fold._q)
        seen = fold._mask.seen(fold._positions, first, len(k), fold._keys)
        whole = Leaf(0, k.shape[1], False)
        scores = fold._mask.scaled(self.of_leaf(whole, fold._q, k))
        scores = torch.where(seen, scores, -torch.inf)
        before = fold._chunk
        most = torch.maximum(before.max, scores.amax(1, keepdim=True))
        factor, weights = exp_nonpositive(before.max - most), exp_nonpositive(scores - most)
        added = sums.sum_rows(((Leaf(0, len(k), False),),), weights.t())[0].unsqueeze(1)
        total = self.of_leaf(Leaf(0, len(k), False), weights, v.t())
        output = before.output * factor + total
        fold._chunk = attention.State(most, before.sum * factor + added, output)


@contextmanager
def tensor_core_order(engine):
    """Compute with the order of an engine in this process: for finite values in bf16."""
    products = Products(engine)
    dispatch.has_native()  # attested before what they are compared with is changed
    with (
        mock.patch.object(dispatch, "is_native", return_value=False),
        mock.patch.object(sums, "sum_leaf", products.of_leaf),
        mock.patch.object(attention, "sum_leaf", products.of_leaf),
        mock.patch.object(attention.Fold, "add", lambda *given: products.add(*given)),
    ):
        yield
