"""Compares, once, what the bits of ranks that train together depend on: versions, engines, dtypes, the batch."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Mapping
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import isobit
from isobit.errors import AgreementError
from isobit.majority import count_votes, name_ranks
from isobit.ops import dispatch
from isobit.order.plan import VERSION
from isobit.parallel.collectives.group import Members
from isobit.parallel.data.batch import GlobalBatch

_SIZE = struct.Struct("<q")
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
ENGINE = "engine of "


def require_alike(facts: Mapping[str, str], members: Members) -> None:
    """Refuses ranks that differ in a fact, and names the minority; all ranks of the group call this together."""
    if len(members.ranks) == 1:
        return
    mine = json.dumps(facts, sort_keys=True).encode()
    sizes = members.all_gather(_SIZE.pack(len(mine)))
    longest = max(_SIZE.unpack(size)[0] for size in sizes)
    held = [json.loads(text) for text in members.all_gather(mine.ljust(longest))]
    for name in sorted({name for each in held for name in each}):
        values = [each.get(name, "not there") for each in held]
        if len(set(values)) > 1:
            refuse_unlike(name, values, members.ranks)


def refuse_unlike(name: str, values: list[str], ranks: tuple[int, ...]) -> None:
    """Names the ranks whose value is not that of most."""
    vote = count_votes(values)
    shown = [
        f"{values[group[0]]} on {name_ranks([ranks[at] for at in group])}" for group in vote.groups
    ]
    wrong = "no majority" if vote.is_tied else f"not that of most ranks, {shown.pop(0)}"
    raise AgreementError(
        expected=f"one value on all {len(ranks)} ranks: {name}",
        received=f"{'; '.join(shown)} ({wrong})",
        remedy="train on hosts of one kind; or start every rank with ONEDNN_MAX_CPU_ISA=AVX2, which takes the slower "
        "engine on all of them; or train in fp32 or fp16, whose engine is one"
        if name.startswith(ENGINE)
        else "start every rank with the same program, settings and model",
    )


def facts_of(dtypes: set[torch.dtype]) -> dict[str, str]:
    """The versions, and the engine of each dtype."""
    engines = {
        f"{ENGINE}{str(dtype).removeprefix('torch.')}": dispatch.engine_of(dtype)
        for dtype in dtypes
    }
    return {"version of isobit": isobit.__version__, "version of the order": str(VERSION)} | engines


def require_alike_trainers(model: nn.Module, batch: GlobalBatch, members: Members) -> None:
    """Before ranks collect one step's gradients."""
    if len(members.ranks) == 1:
        return
    named = [
        (name, str(p.dtype), list(p.shape), p.requires_grad) for name, p in model.named_parameters()
    ]
    digest = blake2b(json.dumps(named).encode(), digest_size=8).hexdigest()
    dtypes = sorted({dtype for _, dtype, _, _ in named})
    facts = {
        "parameters": f"{len(named)} of {', '.join(dtypes) or 'no dtype'} (names, dtypes, shapes, frozen: {digest})",
        "global batch": str(batch),
    }
    require_alike(facts | facts_of(computed_dtypes(model)), members)


def computed_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Of the parameters as operators see them: fully_shard may gather them in another dtype."""
    policies = [
        m._get_fsdp_state()._mp_policy for m in model.modules() if isinstance(m, FSDPModule)
    ]
    gathered = {policy.param_dtype for policy in policies if policy.param_dtype is not None}
    return gathered | {p.dtype for p in model.parameters() if p.is_floating_point()}


def require_alike_engines(dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
    """Before a tensor is split over the ranks of a group; compared once for each group and dtype."""
    if group is None:
        return
    known = _compared.setdefault(group, set())
    if str(dtype) not in known:
        require_alike(facts_of({dtype}), Members.of(group))
        known.add(str(dtype))
