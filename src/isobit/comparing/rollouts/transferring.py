"""Send a trainer's weights to a vLLM server with isobit's worker, over vLLM's weight-transfer endpoints.

[Note: a checked transfer] The trainer saves its weights to a folder that the server reads, and sends the digests of the
tensors in its memory with the folder's name. The worker reads all tensors and compares their digests before it loads
one: a file that is half-written or of another step is refused by the tensor's name, and the server keeps the weights
that it has. Requests that are running end first, and cached keys of the older weights are dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from isobit.comparing.checkpoints.weight_digests import (
    WeightComparison,
    compare_weights,
    digest_weights,
    digests_to_json,
)
from isobit.comparing.rollouts.checking import refused
from isobit.comparing.rollouts.serving import LARGEST, served_weights
from isobit.errors import ArgumentError, ServerError
from isobit.foundation.http_json import Server

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
