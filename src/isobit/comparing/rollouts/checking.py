"""Compare a trainer's weights with the checksums of vLLM's own endpoint /weight_checker, on any vLLM server.

[Note: checksums of fused tensors] vLLM returns a SHA-256 of the bytes of each of its tensors, under its own names. A
fused tensor has the bytes of its parts one after the other, and a vocabulary is padded with rows of zeros to a multiple
of 64. So the trainer computes the same hash of its own tensors. Where the weights that were sent before are known, each
part is tried with its older bytes too: a part that is stale is named. Which rows differ cannot be told from a hash of a
whole tensor; digests of rows come from isobit's worker (`served_weights`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.bits import as_integers, equal
from isobit.comparing.checkpoints.fused import FUSED
from isobit.comparing.checkpoints.weight_digests import WeightComparison, WeightDifference
from isobit.errors import ArgumentError, ServerError
from isobit.foundation.http_json import Reply, Server

ENDPOINT = "/weight_checker"
DEV_MODE = "start vllm serve with the environment variable VLLM_SERVER_DEV_MODE=1"
KEY = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):(.+)")
PADDED = ("embed_tokens.weight", "lm_head.weight")
PADDING = 64  # vLLM's vocabularies are multiples of it
NO_BYTES = hashlib.sha256().hexdigest()
Weights = torch.nn.Module | Mapping[str, Tensor]


def check_weights(
    address: str,
    weights: Weights,
    *,
    dtype: torch.dtype | None = None,
    previous: Weights | None = None,
    key: str = "",
    timeout: float = 600.0,
) -> WeightComparison:
    """Compare the weights that a vLLM server serves with the trainer's, by vLLM's endpoint /weight_checker.

    The server needs no part of isobit. Each of its replicas must have the model whole. See [Note: checksums of fused
    tensors].

    Args:
        address: The address of a `vllm serve` that was started with VLLM_SERVER_DEV_MODE=1.
        weights: The trainer's model, or its tensors by name.
        dtype: Convert floating-point tensors to this dtype first: the server's.
        previous: What was sent before, to name stale parts.
        key: The server's API key, if it has one.
        timeout: Seconds for the server to answer.

    Returns:
        Which tensors are missing, extra, stale or wrong. Rows are not counted.

    Raises:
        ServerError: If the server cannot be reached, has no such endpoint, shards the model, or does not keep the
            weights as they were loaded.
        ArgumentError: If there are no weights.

    Example:
        >>> found = isobit.rollout.check_weights("http://localhost:8000", model)  # doctest: +SKIP
        >>> assert found.equal, found.differences  # doctest: +SKIP
    """
    sent = read_weights(weights, dtype)
    before = {} if previous is None else read_weights(previous, dtype)
    reply = Server(address, key, timeout).post(ENDPOINT, {"action": "checksum"})
    compared, found = 0, []
    for replica, checksums in read_checksums(reply).items():
        used: set[str] = set()
        for name, checksum in checksums.items():
            parts = parts_of(name, sent)
            if not parts:
                found.append(WeightDifference(name, "extra", f"of replica {replica} only"))
                continue
            used.update(parts)
            compared += len(parts)
            found += explain(name, checksum, parts, sent, before)
        left = [name for name in sent if name not in used and not is_tied(name, sent, used)]
        found += [WeightDifference(name, "missing", f"not in replica {replica}") for name in left]
    return WeightComparison(compared, 0, tuple(found))


def read_weights(weights: Weights, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return tensors by name, in the dtype of the server."""
    named = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    if not named:
        raise ArgumentError(
            expected="weights to compare", received="none", remedy="pass the trainer's model"
        )
    return {
        name: tensor.detach().to(dtype or tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in named.items()
    }


def read_checksums(reply: Reply) -> dict[str, dict[str, str]]:
    """Return the checksums of each replica by name."""
    if reply.status != 200:
        raise refused(reply)
    said = reply.json()
    checksums = said.get("checksums") if isinstance(said, dict) else None
    if not isinstance(checksums, dict) or not checksums:
        raise wrong_answer(reply, f"an answer without checksums: {reply.words}")
    found: dict[str, dict[str, str]] = {}
    for place, checksum in checksums.items():
        match = KEY.fullmatch(place)
        if match is None or not isinstance(checksum, str):
            raise wrong_answer(reply, f"an entry {place!r} of another form")
        if any(int(match[at]) for at in (2, 3, 4)):
            raise wrong_answer(reply, f"{place!r}: a model that is sharded over workers")
        found.setdefault(match[1], {})[match[5]] = checksum
    empty = [name for names in found.values() for name, one in names.items() if one == NO_BYTES]
    if empty:
        raise ServerError(
            expected="weights that the server keeps as they were loaded",
            received=f"{len(empty)} tensors without bytes, such as {empty[0]}: packed for the CPU",
            remedy="start the server with isobit's worker, which keeps them",
        )
    return found


def refused(reply: Reply) -> ServerError:
    """Return the error for a server that does not answer with a status of 200."""
    remedies = {404: DEV_MODE + ", vLLM 0.32 or later", 401: "pass key=", 403: "pass key="}
    return ServerError(
        expected=f"an answer of vLLM from {reply.address}",
        received=f"status {reply.status}: {reply.words or 'no words'}",
        remedy=remedies.get(reply.status, "read the server's log"),
    )


def wrong_answer(reply: Reply, received: str) -> ServerError:
    """Return the error for checksums that cannot be compared."""
    return ServerError(
        expected=f"checksums of whole tensors from {reply.address}",
        received=received,
        remedy="serve the model whole in each replica, with vLLM 0.32; for shards compare digests "
        "(isobit.rollout.compare_weights)",
    )


def parts_of(name: str, sent: Mapping[str, Tensor]) -> list[str]:
    """Return the trainer's names of a tensor of vLLM, one after the other; none if it has no such tensors."""
    if name in sent:
        return [name]
    for word, parts in FUSED.items():
        names = [name.replace(f".{word}.", f".{part}.") for part in parts]
        if f".{word}." in name and all(one in sent for one in names):
            return names
    return []


def explain(
    name: str,
    checksum: str,
    parts: Sequence[str],
    sent: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> list[WeightDifference]:
    """Return nothing if the checksum is that of the parts; else the stale ones, or the tensor as wrong."""
    known = all(part in before for part in parts)
    for old in itertools.product((False, True), repeat=len(parts) if known else 0):
        stale = [part for part, is_old in zip(parts, old, strict=False) if is_old]
        tensors = [before[part] if part in stale else sent[part] for part in parts]
        if checksum in hashes_of(name, tensors):
            return [
                WeightDifference(part, "stale", "has the weights sent before") for part in stale
            ]
    detail = f"its checksum is not that of {' + '.join(parts)}"
    return [WeightDifference(name, "wrong", detail)]


def hashes_of(name: str, tensors: Sequence[Tensor]) -> set[str]:
    """Return the checksum of tensors one after the other, and that with a padded vocabulary."""
    plain = hashlib.sha256()
    for tensor in tensors:
        plain.update(as_bytes(tensor))
    found = {plain.hexdigest()}
    if name.endswith(PADDED):
        rows = tensors[0]
        plain.update(bytes(-len(rows) % PADDING * rows[0].nbytes))
        found.add(plain.hexdigest())
    return found


def as_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in memory order, without a copy where it is contiguous."""
    return as_integers(tensor.cpu().contiguous()).reshape(-1).view(torch.uint8).numpy()


def is_tied(name: str, sent: Mapping[str, Tensor], used: set[str]) -> bool:
    """Return whether a head is the embedding, which the server lists once."""
    if not name.endswith("lm_head.weight"):
        return False
    others = [sent[one] for one in used if one.endswith("embed_tokens.weight")]
    return any(equal(sent[name], other) for other in others)
