"""Read one side of a comparison: vLLM's outputs, JSONL, mappings of arrays, files of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.comparing.checkpoints.row_digests import RowDigests
from isobit.comparing.checkpoints.weight_digests import digests_from_json
from isobit.comparing.rollouts.sides import Policy, Scored, Sequence, is_whole, policy_from
from isobit.errors import ArgumentError
from isobit.foundation import files

PREVIOUS, WEIGHTS = "previous", "weights"
LARGEST_FILE = 4 << 30  # bytes
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
            sequence; or the path of a JSONL file with one such record per line.
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
        found = read_jsonl(Path(source))
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


def read_jsonl(path: Path) -> Scored:
    """Read one record per line; a record with `weights` or `previous` has digests instead of a sequence."""
    sequences: list[Sequence] = []
    digests: dict[str, dict[str, RowDigests]] = {}
    for number, line in enumerate(lines_of(path)):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=every_key_once)
            if not isinstance(record, dict):
                raise unreadable(type(record).__name__)
            kinds = [kind for kind in (WEIGHTS, PREVIOUS) if kind in record]
            for kind in kinds:
                digests[kind] = digests_from_json(json.dumps(record[kind]))
            if not kinds:
                sequences.append(read_record(record, str(len(sequences))))
        except ArgumentError as error:
            raise ArgumentError(
                expected=error.expected,
                received=f"line {number + 1} of {path.name}: {error.received}",
                remedy=error.remedy,
            ) from error
        except (ValueError, RecursionError) as error:
            raise unreadable(f"line {number + 1} of {path.name}: {error}") from error
    return Scored(tuple(sequences), digests.get(WEIGHTS), digests.get(PREVIOUS), path.name)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a regular file; other characters that end a line in a text may be part of one."""
    data = files.read_bytes(path, LARGEST_FILE)
    for number, line in enumerate(data.split(b"\n")):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise unreadable(f"line {number + 1} of {path.name}: {error}") from error


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
    return torch.as_tensor(values, dtype=torch.float64).float()
