"""Ask a vLLM engine for the digests of the weights that it serves."""

from __future__ import annotations

from typing import Any

from isobit.comparing.checkpoints.row_digests import RowDigests
from isobit.comparing.checkpoints.weight_digests import RPC, digests_from_json
from isobit.errors import ArgumentError, ServerError
from isobit.foundation.http_json import Reply, Server

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
