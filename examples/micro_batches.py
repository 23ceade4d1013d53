"""Compute one weight gradient of eight samples: in one batch, and in micro-batches of 1, 2 and 4."""

import torch

import isobit
from isobit import Samples, bits
from isobit.parallel import partial

torch.manual_seed(0)
lengths = [11, 16, 13, 19, 7, 300, 1, 40]
grad, x = torch.randn(sum(lengths), 256), torch.randn(sum(lengths), 512)
starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]

weight = torch.zeros(256, 512, requires_grad=True)
y = isobit.linear(x, weight, samples=Samples.packed(lengths))
(whole,) = torch.autograd.grad(y, weight, grad)
print("whole          ", bits.digest(whole))

for size in (1, 2, 4):
    partials, stock = [], torch.zeros_like(whole)
    for first in range(0, 8, size):
        rows = slice(starts[first], starts[first + size])
        share = Samples.packed(lengths[first : first + size], first=first, total=8)
        partials.append(partial.weight_grad(grad[rows], x[rows], share))
        stock += grad[rows].t() @ x[rows]
    print(
        f"micro-batch {size}  ",
        bits.digest(partial.merge(partials, dtype=x.dtype)),
        " stock",
        bits.digest(stock),
    )
