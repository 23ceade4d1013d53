"""A source that is changed by a few characters is refused, or recognised as what it then is.

Each mutant is transformers' own file with one text replaced. Its model either raises when it is enabled or called, or
computes the logits that it computes without isobit.
"""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import isobit
from isobit.errors import UnsupportedError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SCALES = {"logits_scaling": 3.0, "residual_multiplier": 0.4, "embedding_multiplier": 5.0}
EPS = "torch.rsqrt(variance + self.variance_epsilon)"
MLP = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
HALF = "x1 = x[..., : x.shape[-1] // 2]\n    x2 = x[..., x.shape[-1] // 2 :]\n"
LOGITS = "logits = self.lm_head(hidden_states)\n"
MASKED = "past_key_values=past_key_values,\n            position_ids=position_ids,\n        )"
# (family, what is replaced, by what)
# ruff: noqa: E501
MUTANTS = {
    "eps outside of the root": ("llama", EPS, "(torch.rsqrt(variance) + self.variance_epsilon)"),
    "eps forgotten": ("llama", EPS, "torch.rsqrt(variance)"),
    "eps squared": ("llama", EPS, "torch.rsqrt(variance + self.variance_epsilon**2)"),
    "eps a hundred times": ("llama", EPS, "torch.rsqrt(variance + 100 * self.variance_epsilon)"),
    "sum for mean": ("llama", ".pow(2).mean(-1, keepdim=True)", ".pow(2).sum(-1, keepdim=True)"),
    "mean of absolutes": ("llama", ".pow(2).mean(-1, keepdim=True)", ".abs().mean(-1, keepdim=True)"),
    "cubes": ("llama", ".pow(2).mean(-1", ".pow(3).mean(-1"),
    "weight added": ("llama", "return self.weight * hidden", "return self.weight + hidden"),
    "1 + weight": ("llama", "return self.weight * hidden", "return (1 + self.weight) * hidden"),
    "2 + weight": ("llama", "return self.weight * hidden", "return (2 + self.weight) * hidden"),
    "weight forgotten": ("llama", "return self.weight * hidden", "return hidden"),
    "the mean subtracted": (
        "llama",
        "hidden_states = hidden_states.to(torch.float32)\n",
        "hidden_states = hidden_states.to(torch.float32)\n"
        "        hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)\n",
    ),
    "pairs for halves": (
        "llama",
        HALF + "    return torch.cat((-x2, x1), dim=-1)",
        "x1 = x[..., 0::2]\n    x2 = x[..., 1::2]\n    return torch.stack((-x2, x1), dim=-1).flatten(-2)",
    ),
    "backwards": ("llama", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
    "keys not rotated": ("llama", "k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = k"),
    "cos and sin swapped": ("llama", "(q * cos) + (rotate_half(q) * sin)", "(q * sin) + (rotate_half(q) * cos)"),
    "silu of up": ("llama", MLP, "self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))"),
    "gate plus up": ("llama", MLP, "self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))"),
    "silu of the product": ("llama", MLP, "self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))"),
    "mean of the MLP's input": ("llama", MLP, "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x - x.mean(1, keepdim=True)))"),
    "residual doubled": ("llama", "hidden_states = residual + hidden_states\n        return", "hidden_states = residual + residual + hidden_states\n        return"),
    "residual forgotten": ("llama", "hidden_states = residual + hidden_states\n        return", "return"),
    "scale of attention": ("llama", "scaling=self.scaling,", "scaling=self.scaling * 2,"),
    "keys for values": ("llama", "value_states = self.v_proj(hidden_states)", "value_states = self.k_proj(hidden_states)"),
    "softmax of queries": ("llama", "query_states = self.q_proj(hidden_states)", "query_states = self.q_proj(torch.softmax(hidden_states, -1))"),
    "temperature by place": (
        "llama",
        "query_states = self.q_proj(hidden_states)",
        "query_states = self.q_proj(hidden_states * torch.arange(hidden_states.shape[1])[None, :, None])",
    ),
    "places from one": ("llama", "position_ids[..., None].float()", "(position_ids[..., None] + 1).float()"),
    "half the frequencies": ("llama", "emb = torch.cat((freqs, freqs), dim=-1)", "emb = torch.cat((freqs, freqs), dim=-1) * 0.5"),
    "logits doubled": ("llama", LOGITS, LOGITS + "        logits = logits * 2\n"),
    "logits normalised": ("llama", LOGITS, LOGITS + "        logits = logits / logits.std()\n"),
    "a soft cap": ("llama", LOGITS, LOGITS + "        logits = torch.tanh(logits / 30) * 30\n"),
    "the last norm forgotten": ("llama", "hidden_states = self.norm(hidden_states)\n", "\n"),
    "inputs doubled": ("llama", "hidden_states = inputs_embeds\n", "hidden_states = inputs_embeds * 2\n"),
    "a prefix seen from both sides": ("llama", MASKED, MASKED[:-1] + "    or_mask_function=lambda b, h, q, k: k < 5,\n        )"),
    "a mask of even keys": ("llama", MASKED, MASKED[:-1] + "    and_mask_function=lambda b, h, q, k: (k % 2 == 0) | (k == q),\n        )"),
    "1 + weight forgotten": ("gemma", "(1.0 + self.weight.float())", "(self.weight.float())"),
    "the embedding's scale forgotten": ("gemma", " * self.embed_scale.to(self.weight.dtype)", ""),
    "the embedding's scale twice": ("gemma", "self.embed_scale.to(self.weight.dtype)", "(2 * self.embed_scale).to(self.weight.dtype)"),
    "the logits' scale forgotten": ("granite", "logits = logits / self.config.logits_scaling", "logits = logits"),
    "the logits' scale multiplied": ("granite", "logits / self.config.logits_scaling", "logits * self.config.logits_scaling"),
    "the residual's scale forgotten": ("granite", "residual + hidden_states * self.residual_multiplier", "residual + hidden_states"),
}  # fmt: skip


def load(family, old, new, folder, name):
    """Import transformers' file of a family with a text replaced."""
    home = Path(transformers.__file__).parent / "models" / family
    text = (home / f"modeling_{family}.py").read_text()
    assert old in text, "the mutant is transformers' own file"
    text = text.replace(old, new)
    text = re.sub(r"from \.\.\.(\w*)", r"from transformers.\1", text).replace(
        "from transformers. import", "from transformers import"
    )
    text = text.replace(
        f"from .configuration_{family}", f"from transformers.models.{family}.configuration_{family}"
    )
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(family, old, new, folder, name):
    module = load(family, old, new, folder, name)
    kind = family.capitalize()
    extra = SCALES if family == "granite" else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **extra)
    torch.manual_seed(0)
    model = getattr(module, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


IDS = torch.arange(20).reshape(2, 10) * 3 % 61 + 2


@pytest.mark.parametrize("family", ["llama", "gemma", "granite"])
def test_the_file_as_it_is_is_recognised_wholly(family, tmp_path):
    model = build(family, "import torch\n", "import torch\n", tmp_path, f"same_{family}")
    with torch.no_grad():
        stock = model(IDS).logits
        isobit.enable(model)
        torch.testing.assert_close(model(IDS).logits, stock, atol=1e-4, rtol=1e-4)
    from isobit.integrations.transformers.state import find_state

    assert find_state(model).plan.unshipped == []


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.sweep(12)
def test_a_mutant_is_refused_or_recognised_as_what_it_is(name, tmp_path):
    family, old, new = MUTANTS[name]
    model = build(family, old, new, tmp_path, f"mutant_{list(MUTANTS).index(name)}")
    with torch.no_grad():
        stock = model(IDS, use_cache=False).logits
        try:
            isobit.enable(model)
            found = model(IDS, use_cache=False).logits
        except UnsupportedError:
            return
    torch.testing.assert_close(found, stock, atol=1e-4, rtol=1e-4)


def test_there_are_thirty_mutants():
    assert len(MUTANTS) >= 30
