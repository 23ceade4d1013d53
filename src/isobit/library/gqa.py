"""Claims of gqa-kernel-v1: a query head depends on its key head alone; dk and dv of a group are folded by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count
from isobit.library.attention.claims import all_four
from isobit.library.attention.planted import attention
from isobit.library.claims import Subject, on_one_thread


@on_one_thread
def heads_are_alone(subject: Subject, case: Case, tally: Tally) -> None:
    """Each query head has the bits of attention with one head and its key head: prefill, chunk, decode."""
    q, k, v = case.arguments.values()
    group = q.shape[1] // k.shape[1]
    tally.count(len(q) * q.shape[1])
    whole = subject(q, k, v)
    for threads in (1, 2):
        with thread_count(threads):
            for asked in {1, min(7, len(q)), len(q)}:
                where = f"the last {asked} queries, {threads} threads"
                tally.same(subject(q[-asked:], k, v), whole[-asked:], where)
    for h in range(q.shape[1]):
        mine = slice(h // group, h // group + 1)
        found = subject(q[:, h : h + 1], k[:, mine], v[:, mine])
        tally.same(found, whole[:, h : h + 1], f"head {h} with its key head")


@on_one_thread
def groups_are_alone(subject: Subject, case: Case, tally: Tally) -> None:
    """A head's dq and a group's dk and dv depend on nothing else; a head without a gradient adds nothing."""
    q, k, v = case.arguments.values()
    grad, group = case.draw(tuple(q.shape), 71), q.shape[1] // k.shape[1]
    tally.count(len(q) * q.shape[1])
    names = ("y", "dq", "dk", "dv")
    whole = all_four(subject, [q, k, v, grad])
    for g in range(k.shape[1]):
        heads, mine = slice(g * group, (g + 1) * group), slice(g, g + 1)
        alone = all_four(subject, [q[:, heads], k[:, mine], v[:, mine], grad[:, heads]])
        for name, left, right in zip(names, alone, whole, strict=True):
            own = right[:, mine if name in ("dk", "dv") else heads]
            tally.same(left, own, f"{name} of group {g} by itself")
    for h in range(q.shape[1]):
        one, mine = slice(h, h + 1), slice(h // group, h // group + 1)
        alone = all_four(subject, [q[:, one], k[:, mine], v[:, mine], grad[:, one]])
        tally.same(alone[1], whole[1][:, one], f"dq of head {h} by itself")
        only = torch.zeros_like(grad)
        only[:, one] = grad[:, one]
        found = all_four(subject, [q, k, v, only])
        for name, left, right in zip(names[2:], found[2:], alone[2:], strict=True):
            tally.same(left[:, mine], right, f"{name} where head {h} alone has a gradient")


# ---- planted --------------------------------------------------------------------------------------------


def heads_descending(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Fold a group's heads from the last to the first."""
    group = q.shape[-2] // k.shape[-2]
    order = torch.arange(q.shape[-2]).view(-1, group).flip(-1).flatten()
    return attention(q[..., order, :], k, v, **options)[..., order, :]


def keys_repeated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Copy keys for every head; autograd adds the gradients of the copies."""
    group = q.shape[-2] // k.shape[-2]
    return attention(q, k.repeat_interleave(group, -2), v.repeat_interleave(group, -2), **options)


def last_head_counts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Overwrite dk and dv of a group by each head instead of adding."""
    group = q.shape[-2] // k.shape[-2]

    def copies(t: Tensor) -> Tensor:
        return torch.stack([*[t.detach()] * (group - 1), t], -2).flatten(-3, -2)

    return attention(q, copies(k), copies(v), **options)


def first_group_for_all(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Read the first key head for every head: a stride of zero."""
    return attention(q, k[..., :1, :].expand_as(k), v[..., :1, :].expand_as(v), **options)
