"""The backend `isobit` of vLLM's weight transfer: a checkpoint in a folder, with the digests of what was sent.

See [Note: a checked transfer] in isobit.comparing.rollouts.weights. vLLM's own backends need GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from isobit.comparing.checkpoints.readers import read_checkpoint
from isobit.comparing.checkpoints.weight_digests import (
    compare_weights,
    digest_weights,
    digests_from_json,
)
from isobit.errors import ArgumentError

SHOWN = 3  # tensors that an error names


@dataclass
class Nothing(WeightTransferInitInfo):
    """What starts a transfer: nothing, since files are read."""


@dataclass
class Sent(WeightTransferUpdateInfo):
    """A folder with a checkpoint, and the digests of the trainer's tensors as JSON."""

    folder: str
    digests: str


class CheckedTransfer(WeightTransferEngine[Nothing, Sent]):
    """Load a checkpoint if all of its tensors have the digests that were sent."""

    init_info_cls = Nothing
    update_info_cls = Sent

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: weights are replaced when they have been checked."""

    def finish_weight_update(self) -> None:
        """Do nothing: weights are loaded by then."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a checkpoint; vLLM's own method also waits for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Sent) -> None:
        """Read, compare with what was sent, then load."""
        stored = read_checkpoint(Path(update_info.folder))
        tensors = {name: one.load() for name, one in stored.tensors.items()}
        read = digest_weights(tensors, dtype=self.model_config.dtype)
        found = compare_weights(read, digests_from_json(update_info.digests))
        if not found.equal:
            named = "; ".join(
                f"{d.name} is {d.kind}, {d.detail}" for d in found.differences[:SHOWN]
            )
            raise ArgumentError(
                expected=f"the {found.tensors} tensors that the trainer sent",
                received=f"{len(found.differences)} others in {update_info.folder}: {named}",
                remedy="send them again when nothing else writes to that folder",
            )
        reload_weights(self.vllm_config, self.model, iter(tensors.items()), None, True)
