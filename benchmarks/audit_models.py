"""Models for the audit: small random ones from transformers' own classes, and one written by hand.

`build(name)` returns a model and a batch for it. Tests and `python -m benchmarks audit` share this file. The size
"table" has four layers of width 512 and a batch of 8 × 24 tokens; the size "tiny" has two layers of width 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobit.gates.model.models import spread_weights

TABLE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SIZES = {"table": TABLE, "tiny": TINY}
SHAPES = {"table": (8, 24), "tiny": (4, 8)}
CLASSES = 32  # of the image classifier
IMAGES = {
    "table": {"image_size": 64, "patch_size": 16},
    "tiny": {"image_size": 32, "patch_size": 16},
}
UNSET = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        config: the class of its configuration.
        model: the class of its model.
        options: what its configuration needs besides `SIZES`, by size.
    """

    config: str
    model: str
    options: dict[str, dict[str, Any]]


HEADS = {"table": {"head_dim": 64}, "tiny": {"head_dim": 16}}
DERIVED: dict[str, dict[str, Any]] = {
    "table": {},
    "tiny": {},
}  # the width of a head is hidden / heads
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MIXTURE = {
    "table": {"head_dim": 64, "moe_intermediate_size": 512, **EXPERTS},
    "tiny": {"head_dim": 16, "moe_intermediate_size": 48, **EXPERTS},
}
GPT_OSS = {
    "table": {"head_dim": 64, "intermediate_size": 512, **EXPERTS},
    "tiny": {"head_dim": 16, "intermediate_size": 48, **EXPERTS},
}
DELTA = {  # three layers of the gated delta rule and one of attention; one of each in the tiny size
    "table": {
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "tiny": {
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
FAMILIES = {
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", HEADS),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM", DERIVED),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", HEADS),
    "mistral": Family("MistralConfig", "MistralForCausalLM", HEADS),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", HEADS),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", DERIVED),
    "qwen3-moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MIXTURE),
    "gpt-oss": Family("GptOssConfig", "GptOssForCausalLM", GPT_OSS),
    "qwen3.5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
}
NAMES = (*FAMILIES, "vit", "hand-written")


def build(
    name: str,
    size: str = "table",
    dtype: torch.dtype = torch.bfloat16,
    *,
    labels: bool = False,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model with random weights and a batch of its named arguments.

    Args:
        name: one of `NAMES`.
        size: "table" or "tiny".
        dtype: of the weights.
        labels: add labels to the batch, so that the model returns a loss.
        seed: of weights and batch.

    Returns:
        The model in evaluation mode, and the batch.

    Raises:
        KeyError: There is no such name or size.
    """
    torch.manual_seed(seed)
    if name == "hand-written":
        model: nn.Module = HandWritten(**HAND_WRITTEN[size])
    else:
        model = build_from_transformers(name, size)
    spread_weights(model := model.to(dtype).eval(), seed)
    return model, draw_batch(name, size, dtype, labels=labels, seed=seed)


def build_from_transformers(name: str, size: str) -> nn.Module:
    """Build a model from the class and configuration of transformers."""
    import transformers

    if name == "vit":
        sizes = {
            k: v for k, v in SIZES[size].items() if k not in ("num_key_value_heads", "vocab_size")
        }
        config = transformers.ViTConfig(**sizes, **IMAGES[size], num_labels=CLASSES)
        return transformers.ViTForImageClassification(config)
    family = FAMILIES[name]
    sizes = {**SIZES[size], **UNSET, "max_position_embeddings": 512, **family.options[size]}
    return getattr(transformers, family.model)(getattr(transformers, family.config)(**sizes))


def draw_batch(
    name: str, size: str, dtype: torch.dtype, *, labels: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Draw tokens, or images for the image classifier."""
    generator = torch.Generator().manual_seed(seed)
    count, length = SHAPES[size]
    if name == "vit":
        edge = IMAGES[size]["image_size"]
        pixels = torch.randn(count, 3, edge, edge, generator=generator).to(dtype)
        classes = torch.randint(0, CLASSES, (count,), generator=generator)
        return {"pixel_values": pixels, **({"labels": classes} if labels else {})}
    ids = torch.randint(0, SIZES[size]["vocab_size"], (count, length), generator=generator)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, **({"labels": ids.clone()} if labels else {})}


class GatedProduct(torch.autograd.Function):
    """silu(x Wᵍᵀ) · (x Wᵘᵀ) with a derivative written by hand, which computes the products again."""

    @staticmethod
    def forward(context: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(x, gate, up)
        return nn.functional.silu(x @ gate.T) * (x @ up.T)

    @staticmethod
    def backward(context: Any, *derivatives: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (derivative,) = derivatives
        x, gate, up = context.saved_tensors
        opened, raised = x @ gate.T, x @ up.T
        share = torch.sigmoid(opened)
        by_raised = derivative * opened * share
        by_opened = derivative * raised * share * (1 + opened * (1 - share))
        rows = x.reshape(-1, x.shape[-1])
        return (
            by_opened @ gate + by_raised @ up,
            by_opened.reshape(-1, gate.shape[0]).T @ rows,
            by_raised.reshape(-1, up.shape[0]).T @ rows,
        )


class HandWrittenLayer(nn.Module):
    """Causal attention in plain operators, then `GatedProduct`."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Parameter(torch.randn(inner, width) * width**-0.5)
        self.up = nn.Parameter(torch.randn(inner, width) * width**-0.5)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        count, length, width = x.shape
        shape = (count, length, 3, self.heads, width // self.heads)
        query, key, value = self.joint(self.before(x)).view(shape).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(~seen, -1e4).float().softmax(-1).to(x.dtype)
        mixed = (weights @ value).transpose(1, 2).reshape(count, length, width)
        x = x + self.out(mixed)
        return x + self.down(GatedProduct.apply(self.after(x), self.gate, self.up))


class HandWritten(nn.Module):
    """A language model without transformers, without positions and without a cache.

    Returns logits [B, T, V], or a dictionary of loss and logits if labels are passed.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(HandWrittenLayer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        seen = seen[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, seen)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        found = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
        )
        return {"loss": found, "logits": logits}


HAND_WRITTEN = {
    size: {
        "vocabulary": sizes["vocab_size"],
        "width": sizes["hidden_size"],
        "heads": sizes["num_attention_heads"],
        "inner": sizes["intermediate_size"],
        "layers": sizes["num_hidden_layers"],
    }
    for size, sizes in SIZES.items()
}
