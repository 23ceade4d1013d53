"""What one side of a comparison computed: sequences with their log-probabilities, policies and weights."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from isobit.comparing.checkpoints.weight_digests import RowDigests, digests_from_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.addresses import Address, Place, place_of

# What one side of a comparison computed: sequences with their log-probabilities, policies and weights.


@dataclass(frozen=True)
class Policy:
    """How a token's distribution is made from logits. None: not declared.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keeps the k most likely tokens; 0 or -1 keeps all.
        top_p: Keeps the most likely tokens whose probabilities reach p; 1 keeps all.
        normaliser: "kept" if log-probabilities are normalised over what top-k and top-p keep, "full" if over the whole
            vocabulary.
        processors: Names of other logits processors (penalties, bias, min_p, grammar), in order.

    Example:
        >>> isobit.rollout.Policy(temperature=0.8, top_p=0.9).truncates
        True
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    normaliser: str | None = None
    processors: tuple[str, ...] | None = None

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p leaves tokens out."""
        return (self.top_k or 0) > 0 or (self.top_p is not None and self.top_p < 1)


@dataclass(frozen=True)
class Sequence:
    """One completion.

    Attributes:
        id: Its name, the same on both sides.
        prompt: Token ids of the prompt.
        tokens: Token ids of the completion.
        logprobs: log p of each of them, in fp32; None if not computed.
        mask: True for each token that counts in the loss; None for all.
        positions: The position of each token of the completion; None if not recorded.
        rows: Log-probabilities of the whole vocabulary from which each token was taken, [tokens, V]; None if not
            recorded.
        support: The ids that each token was drawn from; None for the whole vocabulary.
        policy: How logits became a distribution.

    Example:
        >>> one = isobit.rollout.Sequence("0", (1, 2), (5, 6), torch.tensor([-1.0, -2.0]))
        >>> one.counts
        tensor([True, True])
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: Tensor | None = None
    mask: Tensor | None = None
    positions: tuple[int, ...] | None = None
    rows: Tensor | None = None
    support: tuple[tuple[int, ...], ...] | None = None
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        """Check that every part has one entry per token."""
        count = len(self.tokens)
        for name, dims in (("logprobs", 1), ("mask", 1), ("rows", 2)):
            part = getattr(self, name)
            if part is not None and part.dim() != dims and part.numel():
                raise ArgumentError(
                    expected=f"{name} of sequence {self.id!r} with {dims} dimension{'s' * (dims - 1)}",
                    received=f"{part.dim()}: {list(part.shape)}",
                    remedy="write one number per token; rows have the whole vocabulary",
                )
        for name in ("logprobs", "mask", "positions", "rows", "support"):
            part = getattr(self, name)
            if part is not None and len(part) != count:
                raise ArgumentError(
                    expected=f"{name} of sequence {self.id!r} with one entry for each of {count} tokens",
                    received=f"{len(part)}",
                    remedy="leave out the prompt and padding, and align entries with token_ids",
                )

    @property
    def counts(self) -> Tensor:
        """Which tokens count in the loss, [tokens]."""
        everything = torch.ones(len(self.tokens), dtype=torch.bool)
        return everything if self.mask is None else self.mask.bool()


@dataclass(frozen=True)
class Scored:
    """All that one side computed.

    Attributes:
        sequences: The completions.
        weights: Digests of the weights that it computed with (isobit.rollout.digest_weights); None if not recorded.
        previous: Digests of the weights before these, to tell stale tensors from wrong ones.
        name: How to call it in a report.

    Example:
        >>> one = isobit.rollout.Sequence("0", (1, 2), (5, 6), torch.tensor([-1.0, -2.0]))
        >>> isobit.rollout.compare(isobit.rollout.Scored((one,)), isobit.rollout.Scored((one,))).equal
        True
    """

    sequences: tuple[Sequence, ...]
    weights: Mapping[str, RowDigests] | None = None
    previous: Mapping[str, RowDigests] | None = None
    name: str = ""


def policy_from(values: Mapping[str, object]) -> Policy:
    """Return a policy from a mapping or vLLM's SamplingParams as one; other keys are left out.

    Raises:
        ArgumentError: A value is no number, or not one that the key can have.
    """
    known = {f.name for f in fields(Policy)}
    found = {name: value for name, value in values.items() if name in known and value is not None}
    for name, (form, is_right) in FORMS.items():
        if name in found and not is_right(found[name]):
            raise ArgumentError(
                expected=f"{name}: {form}",
                received=f"{found[name]!r}"[:200],
                remedy="write what the sampler was given, or leave the key out",
            )
    if "processors" in found:
        found["processors"] = tuple(found["processors"])  # type: ignore[arg-type]
    return Policy(**found)  # type: ignore[arg-type]


def is_number(value: object, low: float, high: float) -> bool:
    """Return whether a value is a number between two others; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        return False
    return bool(low <= value <= high)  # not for a NaN


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def are_names(value: object) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


LARGEST = 1e30  # of a temperature
FORMS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "temperature": ("a number from 0 on", lambda v: is_number(v, 0, LARGEST)),
    "top_k": (
        "a whole number, -1 or 0 for all",
        lambda v: is_whole(v) and is_number(v, -1, LARGEST),
    ),
    "top_p": ("a number from 0 to 1", lambda v: is_number(v, 0, 1)),
    "normaliser": ("kept or full", lambda v: v in ("kept", "full")),
    "processors": ("a list of names", are_names),
}


PREVIOUS, WEIGHTS = "previous", "weights"
LARGEST_ID = 2**63 - 1


def read(
    source: Any,
    *,
    policy: Policy | Mapping[str, object] | None = None,
    weights: Mapping[str, RowDigests] | None = None,
    name: str = "",
) -> Scored:
    """Read what one side computed.

    Args:
        source: A `Scored`; a list of vLLM's RequestOutput (or objects like it); a mapping with `token_ids`, `logprobs`
            and optionally `prompt_token_ids`, `ids`, `mask`, `positions`, `rows`, `support`, each with one entry per
            sequence; or the path of a JSONL file with one such record per line, or of a Parquet file
            with a column per key.
        policy: How logits became a distribution, where the source does not say: `Policy`, or a mapping with
            `temperature`, `top_k`, `top_p`, `normaliser`.
        weights: Digests of the weights, by isobit.rollout.digest_weights.
        name: How to call this side in a report.

    Returns:
        The side.

    Raises:
        ArgumentError: If the source has another form.

    Example:
        >>> side = isobit.rollout.read({"token_ids": [[5, 6]], "logprobs": [[-1.0, -2.0]]})
        >>> side.sequences[0].tokens
        (5, 6)
    """
    if isinstance(source, Scored):
        found = source
    elif isinstance(source, (str, Path)):
        side = FileSide(files_of(source))
        found = Scored(tuple(side), side.weights, side.previous, side.name)
    elif isinstance(source, Mapping):
        found = read_arrays(source)
    elif isinstance(source, Iterable):
        found = Scored(tuple(one for output in source for one in read_output(output)))
    else:
        raise unreadable(f"{type(source).__name__}")
    if policy is not None:
        known = policy if isinstance(policy, Policy) else policy_from(policy)
        found = replace(found, sequences=tuple(replace(s, policy=known) for s in found.sequences))
    return replace(
        found,
        weights=found.weights if weights is None else weights,
        name=name or found.name,
    )


def unreadable(received: str) -> ArgumentError:
    """Return the error of a source that has another form."""
    return ArgumentError(
        expected="vLLM's outputs, a mapping of arrays with token_ids and logprobs, or a JSONL file of such records",
        received=received,
        remedy="see isobit.rollout.read for the keys",
    )


# ---- vLLM -------------------------------------------------------------------------------------------------


def read_output(output: Any) -> list[Sequence]:
    """Read a RequestOutput: its completions with the log-probability of each token, and full rows if it has them."""
    if isinstance(output, Sequence):
        return [output]
    if isinstance(output, Mapping):
        return [read_record(output, "0")]
    prompt, completions = (
        getattr(output, "prompt_token_ids", None),
        getattr(output, "outputs", None),
    )
    if completions is None:
        raise unreadable(f"{type(output).__name__} without .outputs")
    found = []
    for at, one in enumerate(completions):
        tokens = tuple(int(token) for token in one.token_ids)
        found.append(
            Sequence(
                f"{output.request_id}/{at}" if len(completions) > 1 else str(output.request_id),
                tuple(int(token) for token in prompt or ()),
                tokens,
                selected_of(one.logprobs, tokens),
                rows=rows_of(one.logprobs),
            )
        )
    return found


def selected_of(entries: Any, tokens: tuple[int, ...]) -> Tensor | None:
    """Return the log-probabilities of the tokens from vLLM's list of {id: Logprob}."""
    if entries is None:
        return None
    values = [value_of(entry[token]) for entry, token in zip(entries, tokens, strict=True)]
    return torch.tensor(values, dtype=torch.float64).float()


def rows_of(entries: Any) -> Tensor | None:
    """Return full rows if every entry has every id from 0 on, else None."""
    if not entries or any(len(e) < 2 or max(e) + 1 != len(e) for e in entries):
        return None
    if len({len(e) for e in entries}) != 1:
        return None
    rows = [[value_of(entry[i]) for i in range(len(entry))] for entry in entries]
    return torch.tensor(rows, dtype=torch.float64).float()


def value_of(entry: Any) -> float:
    """Return the number of a Logprob, or of a plain number."""
    return float(getattr(entry, "logprob", entry))


# ---- arrays and JSONL -------------------------------------------------------------------------------------


def read_arrays(source: Mapping[str, Any]) -> Scored:
    """Read a mapping whose values have one entry per sequence."""
    if "token_ids" not in source:
        raise unreadable(f"a mapping without token_ids: {sorted(map(str, source))[:8]}")
    shared = ("temperature", "top_k", "top_p", "normaliser", "processors", WEIGHTS, PREVIOUS)
    count = len(source["token_ids"])
    sequences = []
    for at in range(count):
        record = {
            key: value if key in shared else value[at]
            for key, value in source.items()
            if value is not None and key not in (WEIGHTS, PREVIOUS)
        }
        sequences.append(
            read_record({"id": source.get("ids", range(count))[at], **record}, str(at))
        )
    return Scored(tuple(sequences), source.get(WEIGHTS), source.get(PREVIOUS))


class FileSide:
    """One side in files: sequences one at a time, and the digests that were met by then.

    Attributes:
        places: Files of JSONL (one record per line; a record with `weights` or `previous` has digests) or Parquet (a
            column per key). In several files, a sequence without an id has the file's number in its id.
        name: How to call it in a report.
        weights: Digests of the weights, once they were read.
        previous: Those before them.
    """

    def __init__(self, places: tuple[Place, ...], first: int = 0, several: bool = False) -> None:
        """Read these files; `first` is the number of the first one, `several` says that there are others."""
        self.places, self.first = places, first
        self.several = several or len(places) > 1
        self.name = places[0].name if places else ""
        self.weights: dict[str, RowDigests] | None = None
        self.previous: dict[str, RowDigests] | None = None

    def __iter__(self) -> Iterator[Sequence]:
        for number, place in enumerate(self.places, self.first):
            prefix = f"{number}/" if self.several else ""
            read_records = records_of_parquet if place.suffix == PARQUET else records_of_jsonl
            count = 0
            for where, make in read_records(place):
                try:
                    record = make()
                    if not isinstance(record, dict):
                        raise unreadable(type(record).__name__)
                    kinds = [kind for kind in (WEIGHTS, PREVIOUS) if kind in record]
                    for kind in kinds:
                        setattr(self, kind, digests_from_json(json.dumps(record[kind])))
                    if not kinds:
                        yield read_record(record, f"{prefix}{count}")
                        count += 1
                except ArgumentError as error:
                    raise ArgumentError(
                        expected=error.expected,
                        received=f"{where} of {place.name}: {error.received}",
                        remedy=error.remedy,
                    ) from error
                except (ValueError, RecursionError) as error:
                    raise unreadable(f"{where} of {place.name}: {error}") from error


PARQUET = ".parquet"
ENDINGS = (".jsonl", ".ndjson", PARQUET)
LARGEST_LINE = 1 << 30  # bytes
ROWS = 64  # of a Parquet file that are decoded at a time

Records = Iterator[tuple[str, Callable[[], Any]]]


def files_of(path: Path | str) -> tuple[Place, ...]:
    """Return the files that a path or an address names: itself, or a folder's files in the order of their names."""
    place = place_of(path)
    if not place.is_dir():
        return (place,)
    names = sorted((one for one in place.iterdir() if one.suffix in ENDINGS), key=str)
    if not names:
        raise unreadable(f"{path}, a folder without files that end with {', '.join(ENDINGS)}")
    return tuple(names)


def digest_side(path: Path | str) -> str:
    """Return a digest of the files that a path names, read a piece at a time."""
    hashed = blake3()
    for place in files_of(path):
        file = place.open() if isinstance(place, Address) else files.open_regular(place)
        with file:
            while piece := file.read(1 << 20):
                hashed.update(piece)
    return hashed.hexdigest()


def records_of_jsonl(place: Place) -> Records:
    """Yield the place and the parser of each line, one line in memory at a time.

    Other characters that end a line in a text may be part of one.
    """
    raw = place.open() if isinstance(place, Address) else files.open_regular(place)
    with raw, io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20) as file:
        number = 0
        while line := file.readline(LARGEST_LINE + 1):
            number += 1
            if len(line) > LARGEST_LINE:
                raise unreadable(f"line {number} of {place.name}: more than {LARGEST_LINE:,} bytes")
            if line.strip():
                yield f"line {number}", partial(parse_line, line)


def parse_line(line: bytes) -> Any:
    """Return the record of a line."""
    return json.loads(line.decode("utf-8"), object_pairs_hook=every_key_once)


def records_of_parquet(place: Place) -> Records:
    """Yield the place and the maker of each row, a few rows in memory at a time."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ArgumentError(
            expected="the package pyarrow, which reads Parquet files",
            received=str(error),
            remedy='pip install "isobit[arrow]"',
        ) from error
    file = place.open() if isinstance(place, Address) else files.open_regular(place)
    with file:
        number = 0
        try:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=ROWS):
                for row in range(batch.num_rows):
                    yield f"row {number}", partial(row_of, batch, row)
                    number += 1
        except (ArrowException, OSError) as error:
            raise unreadable(f"row {number} of {place.name}: {str(error)[:200]}") from error


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """Return one row as a record; lists of numbers as arrays, which are checked faster than lists."""
    found = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column[row]
        if not value.is_valid:
            continue
        inner: Any = getattr(value, "values", None)
        plain = inner is not None and inner.null_count == 0 and str(inner.type) in NUMBERS
        found[name] = inner.to_numpy(zero_copy_only=False) if plain else value.as_py()
    return found


NUMBERS = {f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)} | {
    "float",
    "double",
    "halffloat",
}


def every_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError for a key that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def read_record(record: Mapping[str, Any], otherwise: str) -> Sequence:
    """Read one sequence from a mapping."""
    if "token_ids" not in record:
        raise unreadable(f"a record without token_ids: {sorted(map(str, record))[:8]}")
    name = record.get("id", otherwise)
    try:
        if not isinstance(name, str) and not is_whole(name):
            raise ValueError("an id is a text or a whole number")
        support = record.get("support")
        return Sequence(
            str(name),
            as_ids(record.get("prompt_token_ids", ())),
            as_ids(record["token_ids"]),
            as_floats(record.get("logprobs")),
            as_mask(record.get("mask")),
            None if record.get("positions") is None else as_ids(record["positions"]),
            as_floats(record.get("rows")),
            None if support is None else tuple(as_ids(s, fill=True) for s in support),
            policy_from(record),
        )
    except ArgumentError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise unreadable(f"record {str(name)[:80]!r}: {error}") from error


def as_ids(values: Any, fill: bool = False) -> tuple[int, ...]:
    """Return token ids or positions; with `fill` without the -1 that fill a support up."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and not fill:
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        if low >= 0 and high <= LARGEST_ID:
            return tuple(listed)
    wrong = next((v for v in listed if not is_whole(v)), None)
    if wrong is not None:
        raise ValueError(f"{str(wrong)[:40]!r} is no whole number")
    found = tuple(int(v) for v in listed if not (fill and int(v) < 0))
    wrong = next((v for v in found if not 0 <= v <= LARGEST_ID), None)
    if wrong is not None:
        raise ValueError(f"{str(wrong)[:40]} is no token id or position")
    return found


def as_mask(values: Any) -> Tensor | None:
    """Return a mask of tokens: True and False, or 1 and 0."""
    if values is None:
        return None
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    wrong = next((v for v in listed if isinstance(v, (str, list)) or v not in (0, 1)), None)
    if wrong is not None:
        raise ValueError(f"{str(wrong)[:40]!r} in a mask, which has true and false")
    return torch.tensor([bool(v) for v in listed], dtype=torch.bool)


def as_floats(values: Any) -> Tensor | None:
    """Return numbers as fp32: a Python float that came from one is that one again."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        return values.detach().cpu().float()
    if isinstance(values, (list, tuple)):
        flat = [v for one in values for v in (one if isinstance(one, (list, tuple)) else (one,))]
        wrong = next((v for v in flat if isinstance(v, (bool, str))), None)
        if wrong is not None:
            raise ValueError(f"{str(wrong)[:40]!r} is no log-probability")
    if isinstance(values, np.ndarray):
        values = values.astype(np.float64)  # a copy: arrays of Arrow are read-only
    return torch.as_tensor(values, dtype=torch.float64).float()
