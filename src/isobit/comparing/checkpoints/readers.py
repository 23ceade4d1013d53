"""Find the format of a path and read it: a file, a folder with or without an index, or folders per rank.

[Note: Files of a folder]
Files whose tensors have different names are parts of one checkpoint. Files that share names are shards of ranks, and
need a rank number in their name: `rank_0`, `mp_rank_00`, `shard-1`. The tensors of rank k are then called `name@k`, and
names.py puts them together. Links to regular files are followed, since download caches consist of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobit.comparing.checkpoints.distributed import METADATA, is_inside, read_distributed
from isobit.comparing.checkpoints.safetensors import read_safetensors
from isobit.comparing.checkpoints.stored import Checkpoint, open_regular, unreadable
from isobit.comparing.checkpoints.torch_files import read_torch_file
from isobit.errors import ArgumentError

LARGEST_INDEX = 1 << 28
# Files of these names next to a checkpoint are not part of the model.
BESIDE = re.compile(r"(training_args|rng_state(_\d+)?|scaler)\.(bin|pt|pth)")
RANK = re.compile(r"(?:^|[^a-z])(?:mp_?)?(?:rank|shard|tp|part)[_-]?(\d+)(?:\D|$)", re.IGNORECASE)
READERS: dict[str, Callable[[Path], Checkpoint]] = {
    ".safetensors": read_safetensors,
    ".pt": read_torch_file,
    ".pth": read_torch_file,
    ".bin": read_torch_file,
    ".ckpt": read_torch_file,
}


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what a path contains: names, dtypes and shapes now, tensors later.

    Args:
        path: A safetensors file, a file of torch.save, a folder of such files with or without an index, a folder of
            torch.distributed.checkpoint, or a folder with a folder per rank.

    Returns:
        The checkpoint.

    Raises:
        ArgumentError: If nothing there can be read, if a file is damaged, or if reading it would run code.
        OSError: If the path, or a file in it, is not there or is not a regular file.
    """
    found = read_folder(path) if path.is_dir() else read_file(path)
    add_configured_tie(found, path if path.is_dir() else path.parent)
    return found


def read_file(path: Path) -> Checkpoint:
    """Read one file, by its ending."""
    if path.name.endswith(".index.json"):
        return read_index(path.parent, path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
        raise unreadable(
            path,
            f"a folder, or a file that ends with {', '.join(READERS)} or .index.json",
            f"{path.suffix or 'no ending'}",
            "name the checkpoint itself",
        )
    return reader(path)


def read_folder(folder: Path) -> Checkpoint:
    """Read a folder: of torch.distributed.checkpoint, with an index, or its files together."""
    if (folder / METADATA).exists():
        return read_distributed(folder)
    indexes = sorted(folder.glob("*.index.json"))
    if indexes:
        chosen = next((i for i in indexes if "safetensors" in i.name), indexes[0])
        return read_index(folder, chosen)
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in READERS)
    files = [p for p in files if not BESIDE.fullmatch(p.name)]
    safe = [p for p in files if p.suffix == ".safetensors"]
    left_out = [p.name for p in files if safe and p not in safe]
    parts = {p.name: read_file(p) for p in safe or files}
    if not parts:
        folders = sorted(p for p in folder.iterdir() if p.is_dir() and RANK.search(p.name))
        parts = {p.name: read_folder(p) for p in folders}
    if not parts:
        raise unreadable(
            folder,
            f"{METADATA}, an index, files that end with {', '.join(READERS)}, or folders of ranks",
            "none of them",
            "name the folder that contains the checkpoint's files",
        )
    found = join_parts(folder, parts)
    if left_out:
        found.notes.append(f"not read, next to safetensors files: {', '.join(left_out)}")
    return found


def join_parts(folder: Path, parts: dict[str, Checkpoint]) -> Checkpoint:
    """Return the files of a folder as one checkpoint; see [Note: Files of a folder]."""
    kinds = [part.kind for part in parts.values()]
    if len(parts) == 1:
        return next(iter(parts.values()))
    names = [name for part in parts.values() for name in (*part.tensors, *part.values)]
    shared = len(names) != len(set(names))
    found = Checkpoint(folder, f"folder of {len(parts)}: {kinds[0]}")
    ranks = [RANK.search(name) for name in parts]
    numbers = [int(match.group(1)) for match in ranks if match]
    if shared and sorted(numbers) != list(range(len(parts))):
        raise unreadable(
            folder,
            "files with different names of tensors, or shards called rank_0, rank_1, …",
            f"{', '.join(parts)} with names in common"[:500],
            "name one of these files, or rename the shards",
        )
    if shared:
        found.notes.append(f"{', '.join(parts)} have names in common: they are shards of ranks")
    for index, part in enumerate(parts.values()):
        suffix = f"@{numbers[index]}" if shared else ""
        for name, tensor in part.tensors.items():
            found.add_tensor(name + suffix, tensor)
        for name, value in part.values.items():
            found.add_value(name + suffix, value)
        found.ties |= part.ties if not shared else {}
        found.notes += part.notes
    return found


def read_index(folder: Path, index: Path) -> Checkpoint:
    """Read the files that an index of transformers names, and check that it names every tensor."""
    where = read_weight_map(index)
    found = Checkpoint(folder, f"folder with {index.name}")
    for file in sorted(set(where.values())):
        if not is_inside(file) or "/" in file or Path(file).suffix.lower() not in READERS:
            raise unreadable(index, "names of checkpoint files in this folder", repr(file))
        part = read_file(folder / file)
        listed = {name for name, home in where.items() if home == file}
        missing, extra = sorted(listed - set(part.tensors)), sorted(set(part.tensors) - listed)
        if missing:
            raise unreadable(
                index, f"every tensor of the index in {file}", f"no {', '.join(missing[:3])}"
            )
        if extra:
            found.notes.append(f"{file} has {len(extra)} tensors that the index does not list")
        for name, tensor in part.tensors.items():
            found.add_tensor(name, tensor)
        for name, value in part.values.items():
            found.add_value(name, value)
        found.ties |= part.ties
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Return which file has which tensor, by an index of transformers."""
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise unreadable(index, "a weight_map from names to files", "something else")
    return where


def read_json(path: Path) -> Any:
    """Read a JSON file of limited size."""
    file, size = open_regular(path)
    with file:
        if size > LARGEST_INDEX:
            raise unreadable(path, f"at most {LARGEST_INDEX:,} bytes", f"{size:,} bytes")
        text = file.read(size)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "JSON", str(error)[:200]) from error


def add_configured_tie(found: Checkpoint, folder: Path) -> None:
    """Note the tie of input and output embeddings that a config.json next to the tensors states."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ArgumentError):
        return
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return
    inputs = [n for n in found.tensors if n.endswith("embed_tokens.weight")]
    if len(inputs) == 1 and not any(n.endswith("lm_head.weight") for n in found.tensors):
        found.ties["lm_head.weight"] = (inputs[0], "tie_word_embeddings in config.json")
