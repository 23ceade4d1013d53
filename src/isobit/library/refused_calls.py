"""Calls that each operator must refuse with an error; every one is (description, arguments, keywords)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isobit.library.claims import Call
from isobit.order.samples import Samples

THREE_ROWS = {"samples": Samples.packed([3])}  # for tensors that have another number of rows


def linear() -> Iterator[Call]:
    """Yield calls of isobit.linear."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    yield "K of x and weight differ", (x, torch.ones(4, 5)), {}
    yield "a weight that is a vector", (x, torch.ones(3)), {}
    yield "a bias of another size", (x, weight, torch.ones(3)), {}
    yield "two dtypes", (x, weight.bfloat16()), {}
    yield "integers", (x.int(), weight.int()), {}
    yield "a sparse input", (x.to_sparse(), weight), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}
    yield "samples that do not describe the rows", (x, weight), THREE_ROWS


def linear_group() -> Iterator[Call]:
    """Yield calls of isobit.linear_group."""
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    yield "no weights", (x, []), {}
    yield "fewer biases than weights", (x, [weight, weight], [None]), {}
    yield "groups that do not divide the rows", (x, [weight]), {"groups": 3}
    yield "no groups", (x, [weight]), {"groups": 0}
    yield "a weight of another width", (x, [weight, torch.ones(4, 5)]), {}
    yield "a bias of another size", (x, [weight], [torch.ones(3)]), {}
    yield "two dtypes", (x, [weight, weight.bfloat16()]), {}
    yield "samples that do not describe the rows", (x, [weight]), THREE_ROWS


def lm_head() -> Iterator[Call]:
    """Yield calls of linear_fp32, which returns logits."""
    hidden, weight = torch.ones(2, 3), torch.ones(5, 3)
    yield "widths that differ", (hidden[:, :2], weight), {}
    yield "a weight that is a vector", (hidden, weight[0]), {}
    yield "two dtypes", (hidden.bfloat16(), weight), {}
    yield "integers", (hidden.int(), weight.int()), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}


def route() -> Iterator[Call]:
    """Yield calls of isobit.route."""
    logits = torch.zeros(3, 8)
    yield "more experts than there are", (logits, 9), {}
    yield "no experts", (logits, 0), {}
    yield "a score that is not known", (logits, 2), {"score": "tanh"}
    yield "groups that do not divide the experts", (logits, 2), {"groups": 3}
    yield "more experts than the best groups have", (logits, 3), {"groups": 4, "top_groups": 1}
    yield "a bias of other experts", (logits, 2), {"bias": torch.zeros(7)}
    yield "integers", (logits.int(), 2), {}


def select_rows() -> Iterator[Call]:
    """Yield calls of isobit.select_rows."""
    x, rows = torch.ones(2, 3, 4), torch.tensor([0, 5])
    yield "a row beyond the last", (x, torch.tensor([0, 6])), {}
    yield "a negative row", (x, torch.tensor([0, -1])), {}
    yield "a row that is chosen twice", (x, torch.tensor([5, 0, 5])), {}
    yield "rows that are numbers", (x, rows.float()), {}
    yield "a mask", (x, torch.ones(6, dtype=torch.bool)), {}
    yield "rows of two axes", (x, rows[None]), {}
    yield "a list of rows", (x, [0, 5]), {}
    yield "integers", (x.int(), rows), {}
    yield "a scalar", (torch.tensor(1.0), rows), {}


def causal_conv() -> Iterator[Call]:
    """Yield calls of isobit.causal_conv."""
    x, weight = torch.ones(2, 3), torch.ones(3, 1, 4)
    yield "a weight of two axes", (x, weight[:, 0]), {}
    yield "a weight that mixes channels", (x, torch.ones(3, 3, 4)), {}
    yield "another number of channels", (x[:, :2], weight), {}
    yield "two dtypes", (x, weight.bfloat16()), {}
    yield "integers", (x.int(), weight.int()), {}
    yield "a vector", (x[0], weight), {}
    yield "fewer rows before than taps", (x, weight), {"before": torch.ones(1, 2, 3)}
    yield "samples that do not describe the rows", (x, weight), THREE_ROWS


def delta_rule() -> Iterator[Call]:
    """Yield calls of isobit.delta_rule."""
    q, v, g = torch.ones(2, 2, 3), torch.ones(2, 4, 5), torch.zeros(2, 4)
    yield "a decay that grows", (q, q, v, g + 1, g), {}
    yield "fewer keys than queries", (q, q[:1], v, g, g), {}
    yield "heads that are no multiple", (q, q, v[:, :3], g[:, :3], g[:, :3]), {}
    yield "a decay for each feature", (q, q, v, v, g), {}
    yield "another number of rates", (q, q, v, g, g[:, :2]), {}
    yield "two dtypes", (q, q, v.bfloat16(), g, g), {}
    yield "integers", tuple(t.int() for t in (q, q, v, g, g)), {}
    yield "a state that is a tensor", (q, q, v, g, g), {"state": torch.zeros(1, 3)}
    yield "samples that do not describe the rows", (q, q, v, g, g), THREE_ROWS


def linear_logprob() -> Iterator[Call]:
    """Yield calls of isobit.linear_logprob."""
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])
    given = hidden, weight, targets
    yield "a target beyond the vocabulary", (hidden, weight, torch.tensor([0, 5])), {}
    yield "a negative target", (hidden, weight, torch.tensor([0, -1])), {}
    yield "targets that are numbers", (hidden, weight, targets.float()), {}
    yield "fewer targets than rows", (hidden, weight, targets[:1]), {}
    yield "widths that differ", (hidden[:, :2], weight, targets), {}
    yield "two dtypes", (hidden.bfloat16(), weight, targets), {}
    yield "integers", (hidden.int(), weight.int(), targets), {}
    yield "a temperature of 0", given, {"temperature": 0.0}
    yield "a temperature that is not a number", given, {"temperature": float("nan")}
    yield "samples that do not describe the rows", given, THREE_ROWS


def linear_cross_entropy() -> Iterator[Call]:
    """Yield calls of isobit.linear_cross_entropy."""
    hidden, weight, targets = torch.ones(2, 3), torch.ones(5, 3), torch.tensor([0, 4])
    yield "no active target", (hidden, weight, torch.full((2,), -100)), {}
    yield "a count of 0", (hidden, weight, targets), {"num_items": 0}
    yield "a negative count", (hidden, weight, targets), {"num_items": -2}
    yield "a target beyond the vocabulary", (hidden, weight, torch.tensor([0, 5])), {}
    yield "fewer targets than rows", (hidden, weight, targets[:1]), {}
    yield "targets that are numbers", (hidden, weight, targets.float()), {}
    yield "a temperature of 0", (hidden, weight, targets), {"temperature": 0.0}


def softmax() -> Iterator[Call]:
    """Yield calls of isobit.softmax and isobit.log_softmax."""
    x = torch.ones(2, 3)
    yield "an axis that does not exist", (x, 2), {}
    yield "an axis that is not an integer", (x, 1.0), {}
    yield "a scalar", (torch.tensor(1.0),), {}
    yield "integers", (x.int(),), {}
    yield "a sparse input", (x.to_sparse(),), {}
    yield "complex numbers", (x.to(torch.complex64),), {}


def norms() -> Iterator[Call]:
    """Yield calls of isobit.rms_norm and isobit.layer_norm."""
    x, weight = torch.ones(2, 3), torch.ones(3)
    yield "a weight of another size", (x, torch.ones(4)), {}
    yield "a weight that is a matrix", (x, x), {}
    yield "no features", (torch.ones(2, 0), torch.ones(0)), {}
    yield "two dtypes", (x, weight.bfloat16()), {}
    yield "integers", (x.int(), weight.int()), {}
    yield "a sparse input", (x.to_sparse(), weight), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}
    yield "a negative eps", (x, weight), {"eps": -1e-6}
    yield "an eps that is not a number", (x, weight), {"eps": float("nan")}
    yield "samples that do not describe the rows", (x, weight), THREE_ROWS


def elementwise() -> Iterator[Call]:
    """Yield calls of isobit.silu and isobit.exact_sum, which take one tensor."""
    x = torch.ones(2, 3)
    yield "integers", (x.int(),), {}
    yield "a sparse input", (x.to_sparse(),), {}
    yield "complex numbers", (x.to(torch.complex64),), {}
    yield "a list", ([1.0],), {}


def gelu() -> Iterator[Call]:
    """Yield calls of isobit.gelu."""
    yield from elementwise()
    yield "another approximation", (torch.ones(2), "sigmoid"), {}
    yield "a boolean for an approximation", (torch.ones(2), True), {}


def swiglu() -> Iterator[Call]:
    """Yield calls of isobit.swiglu."""
    x = torch.ones(2, 3)
    yield "other shapes", (x, x[:1]), {}
    yield "other dtypes", (x, x.double()), {}
    yield "integers", (x.int(), x.int()), {}
    yield "a sparse input", (x, x.to_sparse()), {}


def rotary() -> Iterator[Call]:
    """Yield calls of isobit.rotary."""
    x, c = torch.ones(3, 2, 8), torch.ones(3, 8)
    yield "an odd head", (x[..., :7], c[:, :7], c[:, :7]), {}
    yield "half the angles", (x, c[:, :4], c[:, :4]), {}
    yield "angles of fewer tokens", (x, c[:2], c[:2]), {}
    yield "sines of another shape", (x, c, c[:1]), {}
    yield "angles of another dtype", (x, c.half(), c.half()), {}
    yield "trained angles", (x, c.clone().requires_grad_(), c), {}
    yield "integers", (x.int(), c, c), {}
    yield "one axis", (x[0, 0], c[0], c[0]), {}


def attention() -> Iterator[Call]:
    """Yield calls of isobit.attention."""
    q = torch.ones(4, 2, 16)
    yield "values of another length", (q, q, q[:3]), {}
    yield "a depth that is not a multiple of 16", (q[..., :12], q[..., :12], q[..., :12]), {}
    yield "keys of another depth", (q, torch.ones(4, 2, 32), torch.ones(4, 2, 32)), {}
    yield "query heads that key heads do not divide", (torch.ones(4, 3, 16), q, q), {}
    yield "fewer keys than queries", (q, q[:3], q[:3]), {}
    yield "a window of 0", (q, q, q), {"window": 0}
    yield "a soft cap of 0", (q, q, q), {"softcap": 0.0}
    yield "chunks without causal", (q, q, q), {"chunk_size": 2, "is_causal": False}
    yield "keys of another dtype", (q, q.bfloat16(), q), {}
    yield "integers", (q.int(), q.int(), q.int()), {}
    yield "rows without heads", (q[0], q[0], q[0]), {}
    yield "samples that do not describe the rows", (q, q, q), {"k_samples": Samples.packed([3])}
    yield "more samples of keys than of queries", (q, q, q), {"k_samples": Samples.packed([2, 2])}


def embedding() -> Iterator[Call]:
    """Yield calls of isobit.embedding."""
    ids, weight = torch.tensor([0, 1]), torch.ones(3, 4)
    yield "an id beyond the table", (torch.tensor([3]), weight), {}
    yield "a negative id", (torch.tensor([-1]), weight), {}
    yield "ids that are numbers", (ids.float(), weight), {}
    yield "ids that are a list", ([0, 1], weight), {}
    yield "a table that is a vector", (ids, weight[0]), {}
    yield "a table of integers", (ids, weight.int()), {}
    yield "a padding_idx beyond the table", (ids, weight), {"padding_idx": 3}
    yield "samples that do not describe the ids", (ids, weight), THREE_ROWS


def adamw() -> Iterator[Call]:
    """Yield forms of isobit.optim.AdamW that have no defined bits."""
    given = (torch.ones(2, 3),) * 4
    yield "the fused form", given, {"fused": True}
    yield "the fused and the foreach form", given, {"fused": True, "foreach": True}


def total_norm() -> Iterator[Call]:
    """Yield gradients that have no exact sum."""
    x = torch.ones(3)
    yield "a sparse gradient", ([x, x.to_sparse()],), {}
    yield "fp64", ([x.double()],), {}
    yield "integers", ([x.int()],), {}


def compare_copies() -> Iterator[Call]:
    """Yield copies of parameters that have no bits to compare."""
    x = torch.ones(3)
    yield "nothing", ([{}, {}],), {}
    yield "a sparse tensor", ([{"x": x}, {"x": x.to_sparse()}],), {}
    yield "a tensor without memory", ([{"x": x.to("meta")}] * 2,), {}
