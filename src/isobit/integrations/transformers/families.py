"""The supported model families: their classes, the function that computes each, and what is not supported."""

from __future__ import annotations

from typing import Any

from torch import nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers import modules
from isobit.integrations.transformers.family import Family, Forward
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.refusals import (
    ELSEWHERE,
    check_tree,
    plain_type,
    refuse,
    refuse_wrapper,
)

NAMES = ("Qwen3", "Qwen2", "Llama")
# What `enable` would have to compute for other architectures: by a part of the name of the model's class, the first
# that is found.
MISSING = {
    "Moe": "a router, and sums over experts",
    "Mixtral": "a router, and sums over experts",
    "Gemma": "a gated MLP with gelu, norms that add 1 to their weight, and scaled embeddings",
    "Phi3": "Q, K and V, and gate and up, in one weight each",
    "Mistral": "its classes; what it computes is Llama with a window, which isobit.attention(window=…) has",
}
# Rotary kinds whose frequencies are constants; the others recompute them from the longest sequence of the batch.
ROTARY_KINDS = ("default", "linear", "llama3", "yarn", "proportional")


def load_family(name: str) -> Family:
    """Load one architecture's classes and the function that computes each."""
    home = library(f"models.{name.lower()}.modeling_{name.lower()}")
    forwards: dict[str, Forward] = {
        "RMSNorm": modules.forward_norm,
        "MLP": modules.forward_mlp,
        "Attention": modules.forward_attention,
        "DecoderLayer": modules.forward_layer,
        "RotaryEmbedding": modules.forward_rotary,
    }
    return Family(
        getattr(home, f"{name}ForCausalLM"),
        getattr(home, f"{name}Model"),
        {
            nn.Linear: modules.forward_linear,
            nn.Embedding: modules.forward_embedding,
            **{getattr(home, name + part): forward for part, forward in forwards.items()},
        },
    )


def find_family(model: nn.Module) -> Family:
    """Return the family of a model, or raise if one of its modules is not supported."""
    library()  # the version is checked before anything of it is read
    for name in NAMES:
        if type(model).__name__ in (f"{name}ForCausalLM", f"{name}Model"):
            family = load_family(name)
            if type(model) in (family.causal, family.model):
                check_config(model.config)
                check_tree(model, family)
                return family
    refuse_wrapper(model)
    kind = type(model).__name__
    missing = next((what for part, what in MISSING.items() if part in kind), "its classes")
    remedy = ELSEWHERE
    backbone = getattr(model, "model", None)
    if any(type(backbone).__name__ == f"{name}Model" for name in NAMES):  # another head
        missing = "its head"
        remedy = (
            f"enable the backbone: isobit.enable(model.model), and replace the head; {ELSEWHERE}"
        )
    raise UnsupportedError(
        expected=f"a supported architecture: {', '.join(f'{name}ForCausalLM, {name}Model' for name in NAMES)}",
        received=f"{type(model).__module__}.{kind}; not supported: {missing}",
        remedy=remedy,
    )


def check_config(config: Any) -> None:
    """Raise on options that the operators do not compute."""
    if config.hidden_act != "silu":
        refuse(
            "a gated MLP with silu", f"hidden_act={config.hidden_act!r}", "only SwiGLU is supported"
        )
    kind = config.rope_parameters["rope_type"]
    if kind not in ROTARY_KINDS:
        refuse(
            f"rotary frequencies that are constants: {', '.join(ROTARY_KINDS)}",
            f"rope_type={kind!r}, whose frequencies follow the longest sequence of the batch",
            "choose a constant kind, e.g. yarn",
        )
    if getattr(config, "pretraining_tp", 1) > 1:
        refuse("whole products", f"pretraining_tp={config.pretraining_tp}", "set it to 1")


def plan(
    model: nn.Module, family: Family, whole: dict[type[nn.Module], Forward]
) -> list[tuple[nn.Module, Forward]]:
    """Pair each module with the function that computes it; `whole` has those of the model and its backbone."""
    table = {**family.forwards, **whole}
    found: list[tuple[nn.Module, Forward]] = []
    for name, module in model.named_modules():
        if name.endswith((".q_norm", ".k_norm")):
            found.append((module, modules.forward_head_norm))
        elif name == "lm_head":
            found.append((module, modules.forward_logits))
        elif plain_type(module) in table:
            found.append((module, table[plain_type(module)]))
    return found
