"""A comparison, made once, of everything that the bits of ranks depend on.

Ranks that train together must agree in isobit's version, the version of the order of addition, the
leaf arithmetic of each dtype, the parameters and the global batch.
"""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isobit import __version__
from isobit.errors import AgreementError
from isobit.foundation.majority import count_votes, name_ranks
from isobit.ops import dispatch
from isobit.ops.gpu.tiles import engine_on_gpu
from isobit.order.plan import VERSION
from isobit.parallel.collectives.levels import RankGroup
from isobit.parallel.data.global_batch import GlobalBatch

_SIZE = struct.Struct("<q")
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
ENGINE = "engine of "


def require_same(facts: Mapping[str, str], ranks: RankGroup) -> None:
    """Compare facts over the ranks; all ranks of the group call this together.

    Raises:
        AgreementError: Ranks differ in a fact; the message names the minority.
    """
    if len(ranks.ranks) == 1:
        return
    mine = json.dumps(facts, sort_keys=True).encode()
    sizes = ranks.all_gather(_SIZE.pack(len(mine)))
    longest = max(_SIZE.unpack(size)[0] for size in sizes)
    everyone = [json.loads(text) for text in ranks.all_gather(mine.ljust(longest))]
    for name in sorted({name for each in everyone for name in each}):
        values = [each.get(name, "not there") for each in everyone]
        if len(set(values)) > 1:
            raise_difference(name, values, ranks.ranks)


def raise_difference(name: str, values: list[str], ranks: tuple[int, ...]) -> None:
    """Raise an AgreementError that names the ranks whose value is not the majority's."""
    vote = count_votes(values)
    shown = [
        f"{values[group[0]]} on {name_ranks([ranks[at] for at in group])}" for group in vote.groups
    ]
    wrong = "no majority" if vote.is_tied else f"not that of most ranks, {shown.pop(0)}"
    raise AgreementError(
        expected=f"one value on all {len(ranks)} ranks: {name}",
        received=f"{'; '.join(shown)} ({wrong})",
        remedy="train on hosts of one kind; or start every rank with ONEDNN_MAX_CPU_ISA=AVX2, "
        "which selects the slower arithmetic of CPUs on all of them; or train in fp32 or fp16, which have one"
        if name.startswith(ENGINE)
        else "start every rank with the same program, settings and model",
    )


def facts_of(dtypes: set[torch.dtype], devices: Iterable[torch.device] = ()) -> dict[str, str]:
    """Return the versions, and the leaf arithmetic of each dtype on the GPU among `devices`, else on the CPU."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    engines = {
        f"{ENGINE}{str(dtype).removeprefix('torch.')}": dispatch.engine_of(dtype)
        if gpu is None
        else engine_on_gpu(dtype, gpu)
        for dtype in dtypes
    }
    return {"version of isobit": __version__, "version of the order": str(VERSION)} | engines


def require_same_training(model: nn.Module, batch: GlobalBatch, ranks: RankGroup) -> None:
    """Compare versions, arithmetic, parameters and batch, before ranks train together.

    Raises:
        AgreementError: Ranks differ.
    """
    if len(ranks.ranks) == 1:
        return
    named = [
        (name, str(p.dtype), list(p.shape), p.requires_grad) for name, p in model.named_parameters()
    ]
    digest = blake2b(json.dumps(named).encode(), digest_size=8).hexdigest()
    dtypes = sorted({dtype for _, dtype, _, _ in named})
    facts = {
        "parameters": f"{len(named)} of {', '.join(dtypes) or 'no dtype'} "
        f"(names, dtypes, shapes, frozen: {digest})",
        "global batch": str(batch),
    }
    devices = [p.device for p in model.parameters()]
    require_same(facts | facts_of(computed_dtypes(model), devices), ranks)


def computed_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes that operators compute in, also those `fully_shard` casts to."""
    policies = [
        m._get_fsdp_state()._mp_policy for m in model.modules() if isinstance(m, FSDPModule)
    ]
    gathered = {policy.param_dtype for policy in policies if policy.param_dtype is not None}
    return gathered | {p.dtype for p in model.parameters() if p.is_floating_point()}


def require_same_arithmetic(dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
    """Compare the leaf arithmetic of a dtype, once per group, before a tensor is split over it.

    Raises:
        AgreementError: Ranks differ.
    """
    if group is None:
        return
    known = _compared.setdefault(group, set())
    if str(dtype) not in known:
        require_same(facts_of({dtype}), RankGroup.of(group))
        known.add(str(dtype))
