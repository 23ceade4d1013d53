"""Sums of known order, as vectorised torch code over the rows of a matrix, and targets made of them."""

import math

import torch

from isobit.order.addition import chain, steps_of
from isobit.order.evaluate import leaf_tree
from isobit.reveal.targets.tensor_target import TensorTarget


def pairs(items):
    """Neighbours first; an odd one waits for the next level."""
    items = list(items)
    while len(items) > 1:
        items = [
            tuple(items[i : i + 2]) if i + 1 < len(items) else items[i]
            for i in range(0, len(items), 2)
        ]
    return items[0]


def stripes(n, count, merged):
    return merged([chain(range(lane, n, count)) for lane in range(min(count, n))])


def blocks(n, size, merged):
    return merged([chain(range(at, min(at + size, n))) for at in range(0, n, size)])


def right_fold(items):
    items = list(items)
    branch = items[-1]
    for item in reversed(items[:-1]):
        branch = (item, branch)
    return branch


def permuted(n, seed):
    return chain(torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist())


ORDERS = {
    "left fold": lambda n: chain(range(n)),
    "right fold": lambda n: right_fold(range(n)),
    "reversed": lambda n: chain(range(n - 1, -1, -1)),
    "permuted": lambda n: permuted(n, 7),
    "pairwise": lambda n: pairs(range(n)),
    "4 stripes, folded": lambda n: stripes(n, 4, chain),
    "8 stripes, pairs": lambda n: stripes(n, 8, pairs),
    "16 stripes, pairs": lambda n: stripes(n, 16, pairs),
    "split-K by 2": lambda n: blocks(n, math.ceil(n / 2), pairs),
    "split-K by 4": lambda n: blocks(n, math.ceil(n / 4), pairs),
    "split-K by 8": lambda n: blocks(n, math.ceil(n / 8), chain),
    "blocked by 32": lambda n: blocks(n, 32, chain),
    "blocked by 384": lambda n: blocks(n, 384, chain),
    "AMX's even and odd chains": lambda n: chain(leaf_tree("amx", range(n))),
    "random": lambda n: random_branch(n, 5),
}


def random_branch(n, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = list(range(n))
    while len(parts) > 1:
        i, j = torch.randperm(len(parts), generator=generator)[:2].tolist()
        node = (parts[i], parts[j])
        parts = [p for at, p in enumerate(parts) if at not in (i, j)] + [node]
    return parts[0]


def add_by(branch, columns, add=torch.add):
    """The columns added as the branch says."""
    sums = []
    for step in steps_of(branch):
        total, *others = [columns[~c] if c < 0 else sums[c] for c in step]
        for other in others:
            total = add(total, other)
        sums.append(total)
    return sums[-1] if sums else columns[0]


def target_of(branch, n, places=512, add=torch.add, **given):
    """A target that adds fp32 numbers as the branch says."""
    terms = torch.zeros(n, min(places, n)).t()  # a column is contiguous
    columns = list(terms.t())
    return TensorTarget("synthetic", terms, lambda: add_by(branch, columns, add), **given)


def exact(parts):
    return torch.tensor(
        [math.fsum(column) for column in torch.stack(parts).double().t().tolist()]
    ).float()
