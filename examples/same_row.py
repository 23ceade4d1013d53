"""Compute a row alone and in a batch of 256: stock F.linear changes it, isobit.linear does not."""

import torch
import torch.nn.functional as F

import isobit

torch.manual_seed(0)
x, weight = torch.randn(256, 1024), torch.randn(1024, 1024)

for name, linear in (("F.linear", F.linear), ("isobit.linear", isobit.linear)):
    alone, together = linear(x[:1], weight), linear(x, weight)[:1]
    found = isobit.bits.first_difference(alone, together)
    print(f"{name:14}", found or "0 of 1024 elements differ")
