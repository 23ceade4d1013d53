"""The weights of a vLLM engine: ask for their digests, compare them with a trainer's, and send new ones."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.bits import as_integers, equal
from isobit.comparing.checkpoints.names import FUSED
from isobit.comparing.checkpoints.weight_digests import (
    RPC,
    RowDigests,
    WeightComparison,
    WeightDifference,
    compare_weights,
    digest_weights,
    digests_from_json,
    digests_to_json,
)
from isobit.errors import ArgumentError, ServerError
from isobit.foundation.http_json import Reply, Server

# Ask a vLLM engine for the digests of the weights that it serves.

LARGEST = 1 << 30  # bytes: 32 for each row of a weight
WORKER = "isobit.integrations.vllm.worker.Worker"


def served_weights(
    engine: Any, *, key: str = "", timeout: float = 600.0, largest: int = LARGEST
) -> dict[str, RowDigests]:
    """Return the digests of the weights that a vLLM engine with isobit's worker serves at this moment.

    Compare them with the trainer's after every transfer of weights: a tensor that is wrong, stale or half-written is
    named. Fused weights are compared with their parts.

    Args:
        engine: A `vllm.LLM`, or the address of a `vllm serve` that was started with VLLM_SERVER_DEV_MODE=1.
        key: The server's API key, if it has one.
        timeout: Seconds for the server to answer.
        largest: Bytes of its answer; about 32 for each row of each weight.

    Returns:
        Digests by vLLM's names, for `isobit.rollout.compare_weights`.

    Raises:
        ServerError: If the server cannot be reached, or does not have the endpoint or isobit's worker.
        ArgumentError: If the engine has no collective_rpc, or a digest is not that of its rows.

    Example:
        >>> served = isobit.rollout.served_weights("http://localhost:8000")  # doctest: +SKIP
        >>> sent = isobit.rollout.digest_weights(model, dtype=torch.bfloat16)  # doctest: +SKIP
        >>> isobit.rollout.compare_weights(served, sent).equal  # doctest: +SKIP
        True
    """
    if isinstance(engine, str):
        reply = Server(engine, key, timeout, largest).post("/collective_rpc", {"method": RPC})
        results = read_results(reply)
    elif callable(getattr(engine, "collective_rpc", None)):
        results = ask_engine(engine)
    else:
        raise ArgumentError(
            expected="a vllm.LLM, or the address of a server",
            received=type(engine).__name__,
            remedy="pass the engine itself, or its URL such as http://localhost:8000",
        )
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], str):
        shown = f"{len(results)} of them" if isinstance(results, list) else type(results).__name__
        raise ServerError(
            expected="the digests of one worker",
            received=shown,
            remedy="serve the model whole, in one worker: isobit's worker supports no parallelism",
        )
    return digests_from_json(results[0])


def ask_engine(engine: Any) -> Any:
    """Return the results of a collective RPC of an engine in this process."""
    try:
        return engine.collective_rpc(RPC)
    except Exception as error:  # of a kind that depends on how vLLM runs its workers
        raise ServerError(
            expected="an engine with isobit's worker, which has digests of its weights",
            received=f"{type(error).__name__}: {error}",
            remedy="make it by vllm.LLM(..., **isobit.integrations.vllm.engine_arguments())",
        ) from error


def read_results(reply: Reply) -> Any:
    """Return the results of a collective RPC."""
    if reply.status == 200:
        said = reply.json()
        return said.get("results") if isinstance(said, dict) else said
    if reply.status == 404:
        remedy = "start vllm serve with the environment variable VLLM_SERVER_DEV_MODE=1"
    elif reply.status in (401, 403):
        remedy = "pass key="
    else:
        remedy = f"start vllm serve with --worker-cls {WORKER}; its log has the reason otherwise"
    raise ServerError(
        expected=f"digests of the served weights from {reply.address}",
        received=f"status {reply.status}: {reply.words or 'no words'}",
        remedy=remedy,
    )


# Compare a trainer's weights with the checksums of vLLM's own endpoint /weight_checker, on any vLLM
# server.
#
# [Note: checksums of fused tensors] vLLM returns a SHA-256 of the bytes of each of its tensors,
# under its own names. A
# fused tensor has the bytes of its parts one after the other, and a vocabulary is padded with rows
# of zeros to a multiple of 64. So the trainer computes the same hash of its own tensors. Where the
# weights that were sent before are known, each part is tried with its older bytes too: a part that
# is stale is named. Which rows differ cannot be told from a hash of a whole tensor; digests of rows
# come from isobit's worker (`served_weights`).

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


# Send a trainer's weights to a vLLM server with isobit's worker, over vLLM's weight-transfer
# endpoints.
#
# [Note: a checked transfer] The trainer saves its weights to a folder that the server reads, and
# sends the digests of the
# tensors in its memory with the folder's name. The worker reads all tensors and compares their
# digests before it loads one: a file that is half-written or of another step is refused by the
# tensor's name, and the server keeps the weights that it has. Requests that are running end first,
# and cached keys of the older weights are dropped.

STARTED_WITH = """--weight-transfer-config '{"backend": "isobit"}'"""


def send_weights(
    address: str,
    model: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    key: str = "",
    timeout: float = 600.0,
    largest: int = LARGEST,
) -> WeightComparison:
    """Send a model's weights to a vLLM server with isobit's worker, and compare what it then serves.

    Args:
        address: The address of a `vllm serve` that was started with VLLM_SERVER_DEV_MODE=1 and
            --weight-transfer-config '{"backend": "isobit"}'.
        model: The trainer's model, of transformers.
        folder: Where to save it: a folder that the server can read under the same name.
        dtype: The server's dtype, if it is another than the model's.
        key: The server's API key, if it has one.
        timeout: Seconds for each answer.
        largest: Bytes of the digests; about 32 for each row of each weight.

    Returns:
        The comparison of the served weights with those sent; equal, unless something else writes to them.

    Raises:
        ArgumentError: If the model has adapters, which a server of plain weights does not have.
        ServerError: If the server cannot be reached or refuses; a tensor that it did not read as it was sent is named.
            The weights that it had are still served.

    Example:
        >>> isobit.rollout.send_weights("http://localhost:8000", model, "/shared/step")  # doctest: +SKIP
    """
    refuse_adapters(model)
    sent = digest_weights(model, dtype=dtype or model.dtype)
    model.save_pretrained(folder)
    server = Server(address, key, timeout, largest)
    update = {"folder": str(Path(folder).absolute()), "digests": digests_to_json(sent)}
    ask(server, "/pause?mode=wait")
    try:
        ask(server, "/start_weight_update")
        ask(server, "/update_weights", {"update_info": update})
        ask(server, "/finish_weight_update")
    finally:
        ask(server, "/resume")
    return compare_weights(served_weights(address, key=key, timeout=timeout, largest=largest), sent)


def refuse_adapters(model: Any) -> None:
    """Raise for a model with PEFT adapters, of which save_pretrained would save the adapters alone."""
    modules = model.modules() if hasattr(model, "modules") else ()
    if any(type(module).__module__.startswith("peft.") for module in modules):
        raise ArgumentError(
            expected="a plain model, whose weights a server can serve",
            received=f"{type(model).__name__} with PEFT adapters",
            remedy="send isobit.integrations.transformers.merged_copy(model), and train with "
            'isobit.enable(model, adapters="merged")',
        )


def ask(server: Server, path: str, body: object = ()) -> None:
    """Post to an endpoint; raise unless it succeeds."""
    reply = server.post(path, body or {})
    if reply.status == 500:
        raise ServerError(
            expected=f"weights that {reply.address} takes",
            received=reply.words or "status 500 without words",
            remedy=f"start the server with {STARTED_WITH} and isobit's worker, and give it a folder "
            "that it can read; its log has the reason otherwise",
        )
    if reply.status != 200:
        raise refused(reply)
