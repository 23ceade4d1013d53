"""The models of the gates: configurations of transformers with random weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from isobit.errors import ArgumentError
from isobit.integrations.transformers.package import library, without_bars

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
WHOLE = {"num_hidden_layers": 28, "vocab_size": 151936}
SMALL = {"num_hidden_layers": 2, "vocab_size": 4096}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
# For compiled code that is run on a CPU, instruction by instruction.
MICRO = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 48,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("Qwen3", {**SIZES, **WHOLE, "head_dim": 128, "tie_word_embeddings": True}),
    "qwen3-small": ("Qwen3", {**SIZES, **SMALL, "head_dim": 128, "tie_word_embeddings": True}),
    "qwen2-small": ("Qwen2", {**SIZES, **SMALL, "tie_word_embeddings": True}),
    "llama-small": ("Llama", {**SIZES, **SMALL, "tie_word_embeddings": False}),
    "qwen3-tiny": ("Qwen3", {**TINY, "head_dim": 64, "tie_word_embeddings": True}),
    "qwen2-tiny": ("Qwen2", {**TINY, "hidden_size": 256, "tie_word_embeddings": True}),
    "qwen3-micro": ("Qwen3", {**MICRO, "head_dim": 16, "tie_word_embeddings": False}),
    "llama-tiny": ("Llama", {**TINY, "head_dim": 64, "tie_word_embeddings": False}),
}


def build_model(name: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Build a model, save it and return it as `from_pretrained` loads it.

    Raises:
        ArgumentError: There is no such model.
    """
    transformers = library()
    if name not in MODELS:
        raise ArgumentError(
            expected=f"one of {', '.join(MODELS)}",
            received=repr(name),
            remedy="pass one of these names",
        )
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **sizes, max_position_embeddings=4096, eos_token_id=None
    )
    made = getattr(transformers, f"{family}ForCausalLM")
    with tempfile.TemporaryDirectory() as folder, without_bars():
        torch.manual_seed(seed)
        spread_weights(model := made(config).to(dtype), seed)
        model.save_pretrained(folder)
        del model
        return made.from_pretrained(folder, dtype=dtype).eval()


def spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Give norm weights and biases different elements: ones and zeros would hide a wrong sum."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator).mul_(0.1).to(parameter.dtype)
                )


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens that a model knows.

    Raises:
        ArgumentError: If it is not a language model of transformers with trainable parameters.
    """
    config: Any = getattr(model, "config", None)
    size = (
        getattr(config.get_text_config(), "vocab_size", 0)
        if hasattr(config, "get_text_config")
        else 0
    )
    if not size or not hasattr(model, "generate"):
        raise ArgumentError(
            expected="a causal language model of transformers",
            received=f"{type(model).__module__}.{type(model).__name__}",
            remedy="isobit audit names the operators of any model that depend on the batch; "
            "docs/how-to/own-model.md builds a model from isobit's operators",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError(
            expected="parameters that require a gradient",
            received="a model whose parameters are all frozen",
            remedy="gradients are compared, too: pass a function that returns the model, --model my_models.py:make, "
            "and call model.requires_grad_(True) there; PeftModel.from_pretrained freezes adapters without "
            "is_trainable=True",
        )
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    if other := sorted(kinds - {"float32", "bfloat16"}):
        raise ArgumentError(
            expected="parameters in fp32 or bf16: a step of AdamW in fp16 is not finite",
            received=", ".join(other),
            remedy="--dtype bf16 or --dtype fp32",
        )
    return int(size)
