"""What a teacher said, in a file by sample: written once, read by every run, and checked against the live teacher.

[Note: what a store can get wrong] FALSIFY-ALBOR-006: a stored log-probability has the bits of live inference. An
enabled teacher gives a token the same bits in every batch, so a store is judged by comparison, without a tolerance, and
a wrong one is named: the weights of another model (by digest), samples in another order (an entry has the bits of
another sample), a narrower dtype (an entry is the live one, rounded), tokens that are shifted. What is none of these is
temperature or numerics: a teacher that ran without `isobit.enable`, or elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from isobit import bits
from isobit.errors import ArgumentError
from isobit.integrations.transformers.adapters import inner_model
from isobit.integrations.transformers.distilling import KnownWords, most_likely

FORMAT = "isobit teacher store 1"
FILLER = -1
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StoreFault:
    """One thing that is wrong with a store.

    Attributes:
        cause: weights, order, dtype, shift, tokens, temperature or numerics, or numerics.
        sample: The sample that shows it, or "" for the whole store.
        detail: What was found.
    """

    cause: str
    sample: str
    detail: str


def digest_tokens(tokens: Tensor) -> str:
    """Return a digest of token ids, whatever their integer dtype."""
    return hashlib.sha256(tokens.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()


def digest_model(model: nn.Module) -> str:
    """Return a digest of names and bits of all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(inner_model(model).state_dict().items()):
        found.update(f"{name} {tensor.dtype} {bits.digest(tensor.detach())}\n".encode())
    return found.hexdigest()


def write_store(
    path: str | Path,
    teacher: nn.Module,
    samples: Mapping[str, Tensor],
    *,
    count: int,
    temperature: float = 1.0,
) -> None:
    """Write the `count` most likely words of each token of each sample, with their log-probabilities.

    Args:
        path: A file, which is replaced; in the safetensors format.
        teacher: An enabled causal language model in eval mode.
        samples: Token ids [T] by sample id.
        count: How many words of each token.
        temperature: Of the loss that will read them.
    """
    tensors: dict[str, Tensor] = {}
    tokens = {}
    for name, ids in samples.items():
        found, values = most_likely(teacher, ids[None], count=count, temperature=temperature)
        tensors[f"{name}.ids"] = found[0].to(torch.int32).contiguous()
        tensors[f"{name}.logprobs"] = values[0].contiguous()
        tokens[name] = digest_tokens(ids)
    about = {
        "format": FORMAT,
        "teacher": digest_model(teacher),
        "temperature": repr(float(temperature)),
        "count": str(count),
        "tokens": json.dumps(tokens),
    }
    safetensors().save_file(tensors, str(path), metadata=about)


class TeacherStore:
    """A file that `write_store` wrote.

    Raises:
        ArgumentError: It is not such a file.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file; tensors are read when they are asked for."""
        self.path = Path(path)
        try:
            self._file = safetensors_open(str(path))
            self.about: dict[str, str] = self._file.metadata() or {}
        except Exception as error:
            refuse_store(f"{path}: {error}")
        if self.about.get("format") != FORMAT:
            refuse_store(f"{path}, whose format is {self.about.get('format')!r}")
        try:
            self.tokens: dict[str, str] = json.loads(self.about["tokens"])
            self.temperature = float(self.about["temperature"])
            self.count = int(self.about["count"])
            known = isinstance(self.tokens, dict) and "teacher" in self.about
        except (KeyError, ValueError, RecursionError) as error:
            refuse_store(f"{path}, whose metadata cannot be read: {type(error).__name__}: {error}")
        if not (known and self.count > 0 and 0 < self.temperature < float("inf")):
            refuse_store(f"{path}, whose metadata is {str(self.about)[:200]}")

    def sample(self, name: str) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities [T, count] of a sample.

        Raises:
            ArgumentError: The store has no such sample, or not these two tensors of it.
        """
        if name not in self.tokens:
            raise ArgumentError(
                expected=f"a sample of {self.path}",
                received=repr(name),
                remedy="write the store of the samples that are trained on",
            )
        try:
            ids, values = (self._file.get_tensor(f"{name}.{part}") for part in ("ids", "logprobs"))
        except Exception as error:
            refuse_store(f"{self.path}: {error}")
        fits = ids.dim() == 2 and ids.shape == values.shape and ids.shape[1] == self.count
        if not fits or ids.is_floating_point() or not values.is_floating_point():
            refuse_store(
                f"{self.path}, which has {ids.dtype} {list(ids.shape)} and {values.dtype} "
                f"{list(values.shape)} for {self.count} words of each token of sample {name!r}"
            )
        return ids.to(torch.int64), values

    def batch(self, names: Sequence[str], input_ids: Tensor, attention_mask: Tensor) -> KnownWords:
        """Return the teacher (ids, logprobs) [B, T, count] of a padded batch, for `distil`.

        Raises:
            ArgumentError: A row has other tokens than its sample had when the store was written, or its entry has
                another length or dtype.
        """
        if not (len(names) == len(input_ids) and input_ids.shape == attention_mask.shape):
            raise ArgumentError(
                expected="a sample id for each row, and a mask of the shape of input_ids",
                received=f"{len(names)} ids, input_ids {list(input_ids.shape)} and a mask {list(attention_mask.shape)}",
                remedy="pass the ids of the batch's own samples, in the order of its rows",
            )
        entries = [self.sample(name) for name in names]  # checks the count before it is allocated
        shape = (*input_ids.shape, self.count)
        ids = torch.full(shape, FILLER, dtype=torch.int64)
        values = torch.zeros(shape)
        for row, (name, (found, logs)) in enumerate(zip(names, entries, strict=True)):
            held = attention_mask[row].bool()
            if digest_tokens(input_ids[row][held]) != self.tokens[name]:
                raise ArgumentError(
                    expected=f"the tokens of sample {name!r}, as the teacher read them",
                    received=f"{int(held.sum())} other tokens in row {row}",
                    remedy="pass each row's own sample id; tokenize once",
                )
            if len(found) != int(held.sum()) or logs.dtype != torch.float32:
                refuse_store(
                    f"{self.path}, whose sample {name!r} has {len(found)} tokens in {logs.dtype}, "
                    f"for {int(held.sum())} in fp32"
                )
            ids[row][held], values[row][held] = found, logs
        return KnownWords((ids, values), self.temperature)


def verify_store(
    store: TeacherStore | str | Path,
    teacher: nn.Module,
    samples: Mapping[str, Tensor],
    *,
    names: Iterable[str] | None = None,
) -> list[StoreFault]:
    """Compare a store with the live teacher, bit for bit, and name what is wrong.

    Args:
        store: A store, or its file.
        teacher: The enabled teacher that should have written it.
        samples: Token ids [T] by sample id.
        names: The samples to compare; by default all.

    Returns:
        What is wrong, one entry per sample that shows it; nothing for a right store.

    Raises:
        ArgumentError: There is nothing to compare.
    """
    known = store if isinstance(store, TeacherStore) else TeacherStore(store)
    wanted = list(samples if names is None else names)
    if not wanted:
        raise ArgumentError(
            expected="a sample or more", received="none", remedy="pass names of samples"
        )
    found = []
    if known.about["teacher"] != digest_model(teacher):
        found.append(StoreFault("weights", "", "the store was written by another model"))
    live = {
        name: most_likely(
            teacher, samples[name][None], count=known.count, temperature=known.temperature
        )
        for name in wanted
    }
    for name in wanted:
        if known.tokens.get(name) != digest_tokens(samples[name]):
            found.append(StoreFault("tokens", name, "the store has another sample of this id"))
            continue
        cause = cause_of(known, name, {k: (i[0], v[0]) for k, (i, v) in live.items()})
        if cause is not None and not (found and found[0].cause == "weights"):
            found.append(StoreFault(cause[0], name, cause[1]))
    return found


def cause_of(
    store: TeacherStore, name: str, live: Mapping[str, tuple[Tensor, Tensor]]
) -> tuple[str, str] | None:
    """Return why an entry differs from the live one, or None."""
    ids, values = store.sample(name)
    right_ids, right = live[name]
    if same(ids, values, right_ids, right):
        return None
    for other, (other_ids, other_values) in live.items():
        if other != name and same(ids, values, other_ids, other_values):
            return "order", f"it has the entry of sample {other!r}"
    for dtype in NARROW:
        rounded = right.to(dtype)
        if torch.equal(ids, right_ids) and torch.equal(values.float(), rounded.float()):
            return "dtype", f"its log-probabilities were rounded to {dtype}"
    entry, truth = (ids, values), (right_ids, right)
    for one, two in ((entry, truth), (truth, entry)):
        if len(ids) > 1 and same(one[0][1:], one[1][1:], two[0][:-1], two[1][:-1]):
            return "shift", "its entries are one token away"
    if torch.equal(ids, right_ids):
        return "temperature or numerics", f"{int((values != right).sum())} log-probabilities differ"
    return "numerics", f"{int((ids != right_ids).any(-1).sum())} tokens have other words"


def same(ids: Tensor, values: Tensor, other_ids: Tensor, other: Tensor) -> bool:
    """Return whether two entries have the same words and the same bits."""
    return (
        ids.shape == other_ids.shape
        and values.dtype == other.dtype
        and torch.equal(ids, other_ids)
        and bits.equal(values, other)
    )


def refuse_store(received: str) -> NoReturn:
    """Raise for a file that is not a store."""
    raise ArgumentError(
        expected="a teacher store",
        received=received,
        remedy="write one with write_store",
    )


def safetensors() -> Any:
    """Import safetensors.torch, which transformers needs too."""
    return import_module("safetensors.torch")


def safetensors_open(path: str) -> Any:
    """Open a file for reading single tensors."""
    return import_module("safetensors").safe_open(path, framework="pt")
