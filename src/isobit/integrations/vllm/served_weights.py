"""Digests of the weights that a vLLM model serves, under vLLM's names: fused, and without the rows of padding."""

from __future__ import annotations

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from isobit.comparing.checkpoints.weight_digests import digest_weights, digests_to_json


def digest_served(model: nn.Module) -> str:
    """Return the digests of a model's weights as JSON."""
    return digests_to_json(digest_weights(served_weights(model)))


def served_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name. vLLM pads the vocabulary; rows after the model's own are not served."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            data = weight.detach()
            if isinstance(module, VocabParallelEmbedding):
                data = data[: module.org_vocab_size]
            found[f"{prefix}.{name}" if prefix else name] = data
    return found
