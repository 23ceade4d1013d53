"""Save and load model and optimizer through torch.distributed.checkpoint, at any layout of ranks.

A checkpoint has the names and shapes of the unsplit model, so it can be loaded with other numbers
of data-parallel and tensor-parallel ranks than it was saved with. The bits are the same. It also
has the version of the order of addition: a run that continues under another version has other bits
than the run that saved it, so such a checkpoint is loaded only if the caller names its version.
"""

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
from isobit.foundation.files import digest_files, first_damaged, write_text
from isobit.order.plan import VERSION
from isobit.parallel.collectives.levels import is_first_rank
from isobit.parallel.tensor.shard import Shard, owner_of, shard_table

__all__ = ["Loaded", "load", "save"]

FORMAT = 2
FIRST_FORMAT = 1  # without the version of the order, which was 1
# A file next to torch's own: the step, the user's extra data and the options of the optimizer.
RECORD = "isobit.json"


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint besides tensors."""

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
    """Write a checkpoint folder; every rank calls this.

    The folder gets its name only when it is complete. Stock torch.distributed.checkpoint can read
    it as `{"model": …}`.

    Args:
        path: The folder to create.
        model: The model, whole or split over ranks.
        optimizer: Its optimizer, or None.
        step: The number of steps trained.
        extra: Anything that JSON can represent.

    Raises:
        ArgumentError: The folder exists, or the optimizer has parameters of another model.
        UnsupportedError: A parameter is both a DTensor and a tensor-parallel shard.

    Example:
        >>> import isobit, tempfile
        >>> from isobit.parallel import checkpoint
        >>> model = isobit.nn.Linear(4, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.save(f"{folder}/step-10", model, step=10, extra={"epoch": 1})
        ...     checkpoint.load(f"{folder}/step-10", isobit.nn.Linear(4, 4))
        Loaded(step=10, extra={'epoch': 1})
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.partial")
    if target.exists():
        raise ArgumentError(
            expected="a new folder",
            received=f"{target}, which exists",
            remedy="use a new name for each step",
        )
    groups = [] if optimizer is None else describe_groups(optimizer, names_of(model))
    record = {"format": FORMAT, "order": VERSION, "step": step, "extra": extra or {}}
    record["groups"] = groups
    json.dumps(record)  # raises before anything is written
    state = state_views(model, optimizer)
    if is_first_rank():
        shutil.rmtree(unfinished, ignore_errors=True)
    wait_for_all()
    with with_or_without_ranks() as no_dist:
        write_folder(state, checkpoint_id=unfinished, no_dist=no_dist)
    digests = digest_folder(unfinished)
    if is_first_rank():
        write_text(unfinished / RECORD, json.dumps({**record, "files": digests}))
        unfinished.rename(target)
    wait_for_all()


@torch.no_grad()
def load(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    order: int = VERSION,
) -> Loaded:
    """Read a checkpoint into a model and an optimizer; every rank calls this.

    Args:
        path: A folder that `save` wrote, at any layout of ranks.
        model: Receives this rank's parts, in its own memory.
        optimizer: Receives its state and options, or None.
        order: The version of the order of addition that the checkpoint was saved under. Tensors do
            not depend on it, but a run that continues from them does.

    Returns:
        The step and the extra data.

    Raises:
        ArgumentError: The folder is not a complete checkpoint of this format, one of its files is
            missing or changed after it was saved, it was saved under another version of the order,
            or the optimizer has other parameter groups.

    Example: see `save`.
    """
    source = Path(path)
    if not (source / RECORD).is_file():
        raise ArgumentError(
            expected="a complete folder that isobit.parallel.checkpoint.save wrote",
            received=str(source),
            remedy="pass an earlier checkpoint; a folder that ends in .partial was never finished",
        )
    record = read_record(source)
    check_record(record, source, order)
    check_files(source, record.get("files", {}))
    if optimizer is not None:
        restore_groups(optimizer, names_of(model), record["groups"])
        allocate_state(source, model, optimizer)
    state = state_views(model, optimizer)
    with with_or_without_ranks() as no_dist:
        read_folder(state, checkpoint_id=source, no_dist=no_dist)
    return Loaded(int(record["step"]), dict(record["extra"]))


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digests of all files of a folder; each rank reads those that it wrote."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = sorted(path.name for path in folder.iterdir())
    written = {name for r in range(ranks) for name in names if name.startswith(f"__{r}_")}
    own = [n for n in names if n.startswith(f"__{rank}_") or (rank == 0 and n not in written)]
    found = dict[str, str]()
    for part in gather(digest_files(folder, own)):
        found |= part
    return found


def read_record(source: Path) -> dict[str, Any]:
    """Read the record of a checkpoint.

    Raises:
        ArgumentError: It is not JSON, or not a record.
    """
    try:
        record = json.loads((source / RECORD).read_text())
    except ValueError as error:
        record = str(error)
    if not isinstance(record, dict):
        raise ArgumentError(
            expected=f"a record of a checkpoint in {RECORD}",
            received=f"{source / RECORD}: {record!r:.100}",
            remedy="pass an earlier checkpoint; this one was changed after it was saved",
        )
    return record


def check_files(source: Path, digests: dict[str, str]) -> None:
    """Compare the files with their digests, on every rank some of them; all ranks raise the same.

    Checkpoints that were saved before there were digests are not checked.

    Raises:
        ArgumentError: A file is missing, truncated or changed.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    damaged = gather(first_damaged(source, digests, sorted(digests)[rank::ranks]))
    if wrong := next(filter(None, damaged), ""):
        raise ArgumentError(
            expected="the files that isobit.parallel.checkpoint.save wrote",
            received=f"{source}: {wrong}",
            remedy="pass another checkpoint, or copy this one again from where it was saved",
        )


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check_record(record: dict[str, Any], source: Path, order: int) -> None:
    """Raise unless a checkpoint has a known format, and the version of the order that is asked for.

    Raises:
        ArgumentError: It has another.
    """
    if record.get("format") not in (FORMAT, FIRST_FORMAT):
        raise ArgumentError(
            expected=f"a checkpoint of format {FORMAT}",
            received=f"format {record.get('format')!r} in {source}",
            remedy="load it with the version of isobit that saved it, or read its tensors with "
            "torch.distributed.checkpoint",
        )
    saved = 1 if record["format"] == FIRST_FORMAT else record.get("order")
    if saved != order:
        raise ArgumentError(
            expected=f"a checkpoint of version {order} of the order of addition",
            received=f"version {saved} in {source}",
            remedy=f"pass order={saved} to load its tensors, which are the same in every version; "
            f"steps from there on have the bits of version {VERSION}, not those of the run that "
            "saved it",
        )


def state_views(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the tensors of model and optimizer as torch.distributed.checkpoint expects them."""
    state: dict[str, Any] = {"model": split_views(model, model.state_dict())}
    if optimizer is not None:
        state["optimizer"] = optimizer_views(model, optimizer)
    return state


def split_views(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by parameter name, those of split parameters as DTensor views."""
    shards = shard_table(model)
    return {name: view_of(model, name, value, shards.get(name)) for name, value in tensors.items()}


def view_of(model: nn.Module, name: str, local: Tensor, shard: Shard | None) -> Tensor:
    """Return a view without a copy: what is read into the view is read into the tensor."""
    if shard is None or shard.parts == 1:
        return local.detach()
    if isinstance(local, DTensor):
        raise UnsupportedError(
            expected="a plain parameter on each rank",
            received=f"{name}, a DTensor that is also a {shard}",
            remedy="save before applying fully_shard, or split the model in one of the two ways",
        )
    mesh = owner_of(model, name).require_mesh()
    return DTensor.from_local(local.detach(), mesh, [Placement(shard.axis)], run_check=False)


def optimizer_views(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the state tensors by name of the state, then of the parameter."""
    shards, found = shard_table(model), dict[str, dict[str, Tensor]]()
    for name, parameter in parameters_of(model, optimizer):
        for key, value in optimizer.state[parameter].items():
            cut = shards.get(name) if value.shape == parameter.shape else None
            found.setdefault(key, {})[name] = view_of(model, name, value, cut)
    return found


def allocate_state(source: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the state tensors that the checkpoint has, in this rank's shapes, to be read into."""
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
            # zeros_like makes a DTensor where fully_shard made the parameter one.
            optimizer.state[parameter][state] = (
                torch.zeros_like(parameter.detach(), dtype=dtype)
                if len(value.size)
                else torch.zeros((), dtype=dtype)
            )


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of parameters; a tied parameter has its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def parameters_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the optimizer's parameters with their names in the model."""
    names = names_of(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def describe_groups(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> list[dict[str, Any]]:
    """Return each group's options and the names of its parameters.

    Raises:
        ArgumentError: The optimizer has parameters that are not the model's.
    """
    foreign = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ArgumentError(
            expected="an optimizer of this model's parameters",
            received=f"{foreign} others",
            remedy="create the optimizer after the model is split, from model.parameters()",
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
    """Restore the saved options of each group.

    Raises:
        ArgumentError: The optimizer has other groups than the saved one.
    """
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
            remedy="create the optimizer with the same parameter groups as the saved one",
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
    """Yield whether this process is alone, without torch's warning about it."""
    if dist.is_initialized():
        yield False
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield True


def wait_for_all() -> None:
    """Wait until all ranks are here, if there are several."""
    if dist.is_initialized():
        dist.barrier()
