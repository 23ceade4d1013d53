"""Models with random weights for `isobit gate model`, besides those that it builds: LoRA, and a mixture of experts."""

from typing import Any

import torch


def mistral_lora() -> Any:
    """Return Mistral with the sizes of Qwen3-0.6B and LoRA on every linear layer; its adapters are not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        sliding_window=1024,
        tie_word_embeddings=True,
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(MistralForCausalLM(config), adapters).eval()


def qwen3_moe() -> Any:
    """Return a Qwen3-MoE with the 48 layers and 8 chosen experts of Qwen3-30B-A3B; its other sizes are small."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=128,
        num_hidden_layers=48,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
    )
    return Qwen3MoeForCausalLM(config).eval()
