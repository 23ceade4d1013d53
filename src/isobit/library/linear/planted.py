"""Planted wrong linear layers, which the claims of matmul-kernel-v1 must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from isobit.foundation import backends, launches
from isobit.library.claims import Subject, gradients, is_real, rows_of
from isobit.nn.freezing import freeze
from isobit.nn.linear import Linear
from isobit.ops import dispatch
from isobit.ops.linear import partial, portable
from isobit.ops.linear.op import linear
from isobit.ops.linear.targets import Decoder
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples

# Everything a linear layer computes, whole and in shares: by isobit, and by any plain function.

Share = tuple[Tensor, Tensor, Samples]  # of a batch: (grad, x, samples)


@dataclass(frozen=True)
class LinearLayer:
    """One implementation of a linear layer."""

    output: Callable[..., Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    parameter_grads: Callable[[Tensor, Tensor, Samples], tuple[Tensor, Tensor]]
    accumulate: Callable[[Sequence[Share]], tuple[Tensor, Tensor]]
    cut_output: Callable[[Tensor, Tensor, int], Tensor]
    cut_input_grad: Callable[[Tensor, Tensor, int], Tensor]
    decoder: Decoder

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the output."""
        return self.output(x, weight, bias)


def portable_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the portable executor's result."""
    return portable.linear(x, weight, bias)


def layer_of(subject: Subject) -> LinearLayer:
    """Return isobit's implementation for isobit.linear, a plain one for any other function."""
    if isinstance(subject, LinearLayer):
        return subject
    return OURS if subject is linear else plain_layer(subject)


def grads_by(
    function: Subject, grad: Tensor, x: Tensor, samples: Samples | None = None
) -> tuple[Tensor, Tensor]:
    """Return dW and db by autograd."""
    parameters = x.new_zeros(grad.shape[-1], x.shape[-1]), x.new_zeros(grad.shape[-1])
    named = {} if samples is None else {"samples": samples}
    found = gradients(lambda weight, bias: function(x, weight, bias, **named), parameters, grad)
    return found[0], found[1]


def input_grad_by(function: Subject, grad: Tensor, weight: Tensor) -> Tensor:
    """Return dX by autograd."""
    x = grad.new_zeros(*grad.shape[:-1], weight.shape[1])
    return gradients(lambda x: function(x, weight), [x], grad)[0]


def our_accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """Merge the partial gradients of micro-batches by the tree over samples."""
    dtype = shares[0][0].dtype
    weights = [partial.weight_grad(*share) for share in shares]
    biases = [partial.bias_grad(grad, samples) for grad, _, samples in shares]
    return partial.merge(weights, dtype=dtype), partial.merge(biases, dtype=dtype)


def our_cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge the shares of y over K, the last rank's first."""
    cuts = [Cut(x.shape[-1], parts, i) for i in reversed(range(parts))]
    shares = [partial.output(share_of(x, cut), share_of(weight, cut), cut) for cut in cuts]
    return partial.merge(shares, dtype=x.dtype)


def our_cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge the shares of dX over N."""
    cuts = [Cut(grad.shape[-1], parts, i) for i in range(parts)]
    shares = [
        partial.input_grad(share_of(grad, cut), share_of(weight.t(), cut).t(), cut) for cut in cuts
    ]
    return partial.merge(shares, dtype=grad.dtype)


def share_of(tensor: Tensor, cut: Cut) -> Tensor:
    """Return the part of the last axis that one rank has."""
    return tensor[..., cut.start : cut.start + cut.length]


def our_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a frozen isobit.nn.Linear over the same parameters."""
    ours = Linear.sharing(layer)
    freeze(ours)
    return ours


# Through autograd, so that what a user gets is judged.
OURS = LinearLayer(
    linear,
    lambda grad, weight: input_grad_by(linear, grad, weight),
    lambda grad, x, samples: grads_by(linear, grad, x, samples),
    our_accumulate,
    our_cut_output,
    our_cut_input_grad,
    our_decoder,
)


def plain_layer(function: Subject) -> LinearLayer:
    """Return what people do with a function that has no shares: zero padding, add in order of arrival."""

    def parameter_grads(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        real = is_real(samples).unsqueeze(1)
        rows, inputs = (torch.where(real, t.reshape(-1, t.shape[-1]), 0) for t in (grad, x))
        return grads_by(function, rows, inputs)

    def accumulate(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
        weight, bias = parameter_grads(*shares[0])
        for share in shares[1:]:
            more = parameter_grads(*share)
            weight, bias = weight + more[0], bias + more[1]
        return weight, bias

    def cut_output(x: Tensor, weight: Tensor, parts: int) -> Tensor:
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        return torch.stack([function(a, b) for a, b in pairs]).sum(0)

    def cut_input_grad(grad: Tensor, weight: Tensor, parts: int) -> Tensor:
        pairs = zip(grad.chunk(parts, -1), weight.chunk(parts, 0), strict=True)
        return torch.stack([input_grad_by(function, a, b) for a, b in pairs]).sum(0)

    return LinearLayer(
        function,
        lambda grad, weight: input_grad_by(function, grad, weight),
        parameter_grads,
        accumulate,
        cut_output,
        cut_input_grad,
        lambda layer: lambda x: function(x, layer.weight),
    )


def segments_of(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return every segment of y by itself, in fp32."""
    count = FeaturePlan(x.shape[-1]).count
    cuts = [Cut(x.shape[-1], count, i) for i in range(count)]
    return [partial.output(share_of(x, c), share_of(weight, c), c).values[0] for c in cuts]


def with_bias(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the bias and round."""
    return (total if bias is None else total + bias.float()).to(dtype)


def split_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Split K where there are more than 16 rows."""
    if x.shape[0] <= 16:
        return linear(x, weight, bias)
    third = x.shape[-1] // 3
    total = linear(x[:, :third].float(), weight[:, :third].float())
    total = total + linear(x[:, third:].float(), weight[:, third:].float())
    return with_bias(total, bias, x.dtype)


def sizes_exchanged(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch with k and n exchanged: the same three numbers, of another problem."""
    linear(x.new_zeros(len(x), len(weight)), weight.T.contiguous())
    return x.new_zeros(len(x), len(weight))


def recorded_only(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Record a launch with the right sizes, and compute by torch's own kernel."""
    executor = "triton" if backends.chosen() else dispatch.executor_of(x.dtype)
    launches.record("linear", executor, x.dtype, (len(x), x.shape[-1], len(weight)))
    return torch.nn.functional.linear(x, weight, bias)


def narrow_merges(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Round segments to bf16 before they are merged."""
    total = segments_of(x, weight)[0]
    for segment in segments_of(x, weight)[1:]:
        total = (total.bfloat16() + segment.bfloat16()).float()
    return with_bias(total, bias, x.dtype)


def left_fold(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Fold segments from the left instead of merging by the tree."""
    return with_bias(reduce(torch.add, segments_of(x, weight)), bias, x.dtype)


def reordered_tail(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum the columns after the last whole panel of 64 backwards."""
    whole = weight.shape[0] // 64 * 64
    body = linear(x, weight[:whole], None)
    tail = linear(x.flip(-1), weight[whole:].flip(-1), None)
    y = torch.cat([body, tail], -1)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def swapped_square(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Exchange K and N, which only a square weight allows."""
    return linear(x, weight.t() if weight.shape[0] == weight.shape[1] else weight, bias)


def anchored_at_padding(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Count leaves from the padded start of each row of the batch; padding is zero."""
    real = is_real(samples).unsqueeze(1)
    width = samples.rows // max(len(samples.spans), 1)
    if sum(length for _, length in samples.spans) == samples.rows:  # packed: nothing is padded
        return OURS.parameter_grads(grad, x, samples)
    grid = Samples.packed([width] * len(samples.spans))
    return OURS.parameter_grads(torch.where(real, grad, 0), torch.where(real, x, 0), grid)


def in_call_order(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """Add micro-batch gradients one after another, as autograd does."""
    found = [
        (partial.weight_grad(*share).values, partial.bias_grad(share[0], share[2]).values)
        for share in shares
    ]
    dtype = shares[0][0].dtype
    weight, bias = (torch.cat(list(values)) for values in zip(*found, strict=True))
    return reduce(torch.add, weight).to(dtype), reduce(torch.add, bias).to(dtype)


def reversed_tokens(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Reverse the rows of every sample: the right sum, in another order."""
    lengths = [length for _, length in samples.spans]
    order = torch.cat([run.flip(0) for run in torch.split(rows_of(samples), lengths)])
    return OURS.parameter_grads(grad[order], x[order], Samples.packed(lengths))


def stale_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Copy the weight once, and never again."""
    kept = layer.weight.detach().clone()
    return lambda x: linear(x, kept)


def shifted_cut(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge ranks by a ring that starts at rank 1."""
    pieces = list(zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True))
    sums = [partial.output(*p, Cut(x.shape[-1], parts, i)).values[0] for i, p in enumerate(pieces)]
    return reduce(torch.add, [*sums[1:], sums[0]]).to(x.dtype)


split_k_by_rows = replace(OURS, output=split_by_rows)
tail_reordered = replace(OURS, output=reordered_tail)
bf16_merges = replace(OURS, output=narrow_merges)
folded_segments = replace(OURS, output=left_fold)
ring_of_ranks = replace(OURS, cut_output=shifted_cut)
leaf_at_padding = replace(OURS, parameter_grads=anchored_at_padding)
summed_in_call_order = replace(OURS, accumulate=in_call_order)
samples_reversed = replace(OURS, parameter_grads=reversed_tokens)
axes_swapped_where_square = replace(OURS, output=swapped_square)
axes_swapped = replace(OURS, output=lambda x, weight, bias=None: linear(x, weight, bias).t())
stale_packed_weight = replace(OURS, decoder=stale_decoder)
