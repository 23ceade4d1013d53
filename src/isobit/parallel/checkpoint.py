"""Model and optimizer saved and loaded through torch.distributed.checkpoint, as the whole, at any layout of ranks."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_folder
from torch.distributed.checkpoint.state_dict_saver import save as write_folder
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Placement

from isobit.errors import ArgumentError, UnsupportedError
from isobit.files import write_text
from isobit.parallel.collectives.group import is_first_rank
from isobit.parallel.tensor.shard import Shard, owner_of, table

FORMAT = 1
RECORD = "isobit.json"  # beside torch's own files: the step, what the caller adds, and the optimizer's options


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says besides tensors."""

    step: int
    extra: dict[str, Any]


@torch.no_grad()
def save(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a folder that appears under its name only when it is whole; every rank calls this.

    Names and shapes are those of the unsplit model: stock torch.distributed.checkpoint reads it as {"model": …}.
    `extra` is anything that JSON can say.
    """
    target = Path(path)
    making = target.with_name(f"{target.name}.partial")
    if target.exists():
        raise ArgumentError(
            expected="a new folder",
            received=f"{target}, which exists",
            remedy="name one for each step",
        )
    groups = [] if optimizer is None else describe_groups(optimizer, names_of(model))
    record = json.dumps({"format": FORMAT, "step": step, "extra": extra or {}, "groups": groups})
    state: dict[str, Any] = {"model": split_views(model, model.state_dict())}
    if optimizer is not None:
        state["optimizer"] = optimizer_views(model, optimizer)
    if is_first_rank():
        shutil.rmtree(making, ignore_errors=True)
    wait_for_all()
    with with_or_without_ranks() as no_dist:
        write_folder(state, checkpoint_id=making, no_dist=no_dist)
    if is_first_rank():
        write_text(making / RECORD, record)
        making.rename(target)
    wait_for_all()


@torch.no_grad()
def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Loaded:
    """Reads this rank's parts into the model's own memory, and the optimizer's state; every rank calls this.

    The layout may be another than the one that saved: the bits are the same.
    """
    source = Path(path)
    if not (source / RECORD).is_file():
        raise ArgumentError(
            expected="a folder that isobit.parallel.checkpoint.save wrote to its end",
            received=str(source),
            remedy="name an earlier checkpoint; one that ends in .partial was never finished",
        )
    record = json.loads((source / RECORD).read_text())
    if record.get("format") != FORMAT:
        raise ArgumentError(
            expected=f"a checkpoint of format {FORMAT}",
            received=f"format {record.get('format')!r} in {source}",
            remedy="load it with the isobit that saved it, or read its tensors by torch.distributed.checkpoint",
        )
    state: dict[str, Any] = {"model": split_views(model, model.state_dict())}
    if optimizer is not None:
        restore_groups(optimizer, names_of(model), record["groups"])
        make_room(source, model, optimizer)
        state["optimizer"] = optimizer_views(model, optimizer)
    with with_or_without_ranks() as no_dist:
        read_folder(state, checkpoint_id=source, no_dist=no_dist)
    return Loaded(int(record["step"]), dict(record["extra"]))


# ---- tensors: local ones, seen as parts of the whole ---------------------------------------------------------


def split_views(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By parameter name: tensors that are cut as their parameter is, as views that know their place; others as is."""
    shards = table(model)
    return {name: view_of(model, name, value, shards.get(name)) for name, value in tensors.items()}


def view_of(model: nn.Module, name: str, local: Tensor, shard: Shard | None) -> Tensor:
    """No copy: what is read into the view is read into the tensor."""
    if shard is None or shard.parts == 1:
        return local.detach()
    if isinstance(local, DTensor):
        raise UnsupportedError(
            expected="a plain parameter on each rank",
            received=f"{name}, a DTensor beside its shard {shard}",
            remedy="save before wrapping, or split by one of them",
        )
    mesh = owner_of(model, name).require_mesh()
    return DTensor.from_local(local.detach(), mesh, [Placement(shard.axis)], run_check=False)


def optimizer_views(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """By name of the state, then of the parameter."""
    shards, found = table(model), dict[str, dict[str, Tensor]]()
    for name, parameter in parameters_of(model, optimizer):
        for key, value in optimizer.state[parameter].items():
            cut = shards.get(name) if value.shape == parameter.shape else None
            found.setdefault(key, {})[name] = view_of(model, name, value, cut)
    return found


def make_room(source: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """State tensors as the checkpoint has them, of this rank's shapes, to be read into."""
    saved: dict[str, dict[str, Any]] = {}
    for key, value in FileSystemReader(source).read_metadata().state_dict_metadata.items():
        space, _, rest = key.partition(".")
        if space == "optimizer":
            state, _, name = rest.partition(".")
            saved.setdefault(name, {})[state] = value
    for name, parameter in parameters_of(model, optimizer):
        optimizer.state[parameter].clear()
        for state, value in saved.get(name, {}).items():
            dtype = value.properties.dtype
            like = torch.zeros_like(
                parameter.detach(), dtype=dtype
            )  # of its own kind: a DTensor under fully_shard
            optimizer.state[parameter][state] = (
                like if len(value.size) else torch.zeros((), dtype=dtype)
            )


# ---- the optimizer's parameters and options -------------------------------------------------------------------


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """A tied parameter has its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def parameters_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters, by their names in the model."""
    names = names_of(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def describe_groups(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Each group's options, and its parameters by name."""
    foreign = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ArgumentError(
            expected="an optimizer of this model's parameters",
            received=f"{foreign} others",
            remedy="make the optimizer after the model is split, from model.parameters()",
        )
    return [
        {
            "options": {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            },
            "parameters": [names[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]


def restore_groups(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], saved: list[dict[str, Any]]
) -> None:
    """The options that were saved, for the same groups."""
    here = [group["parameters"] for group in describe_groups(optimizer, names)]
    there = [group["parameters"] for group in saved]
    if here != there:
        missing = {name for group in there for name in group} ^ {
            name for group in here for name in group
        }
        raise ArgumentError(
            expected=f"an optimizer of {len(there)} groups with the saved parameters",
            received=f"{len(here)} groups"
            + (f", without or besides {sorted(missing)[:3]}" if missing else ""),
            remedy="make the optimizer as the saved one was made",
        )
    for group, known in zip(optimizer.param_groups, saved, strict=True):
        options = known["options"]
        group.update(
            {
                key: tuple(v) if isinstance(group.get(key), tuple) else v
                for key, v in options.items()
            }
        )


@contextmanager
def with_or_without_ranks() -> Iterator[bool]:
    """Whether this process is alone, which torch warns of."""
    if dist.is_initialized():
        yield False
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield True


def wait_for_all() -> None:
    """Between what one rank does and what all do."""
    if dist.is_initialized():
        dist.barrier()
