"""Digests of the sources that were read; tests/integrations/families/test_shipped_digests.py recomputes them.

This is the only file that names model families. An entry is the digest of a forward (source.py), the class or function
where it was read, and what it computes. A source that changes with a new version of transformers has another digest:
norms and rotations are then probed, composites are read anew, and heads are refused.
"""

from __future__ import annotations

from isobit.integrations.transformers.parts.experts import Router
from isobit.integrations.transformers.parts.layers import NormFormula

# Norms, with their formulas.
NORMS: dict[str, tuple[str, NormFormula]] = {
    "f5c95295c0f85e5a": ("llama.LlamaRMSNorm", NormFormula(eps="variance_epsilon")),
    "9bb6bb8e55cf1713": ("olmo2.Olmo2RMSNorm", NormFormula(eps="variance_epsilon")),
    "3b3f6d977ddddc48": ("gemma.GemmaRMSNorm", NormFormula(eps="eps", offset=1.0)),
    "f8ed60cd782f6eeb": ("helium.HeliumRMSNorm", NormFormula(eps="variance_epsilon")),
    "35199ec292caa373": ("llama4.Llama4TextRMSNorm", NormFormula(eps="eps")),
    "c197c03eb463e39d": ("llama4.Llama4TextL2Norm", NormFormula(eps="eps", weight=None)),
}
# Rotary embeddings: cos and sin of both halves, by position (and by kind of layer).
ROTARY_EMBEDDINGS: dict[str, str] = {
    "fdf4680dfba67887": "llama.LlamaRotaryEmbedding",
    "4f7632eb56738bce": "olmo2.Olmo2RotaryEmbedding",
    "ce2243f886fc92d9": "gpt_oss.GptOssRotaryEmbedding",
    "d6679696f0a16fc4": "olmo3.Olmo3RotaryEmbedding",
    "aa5f8d996efa89a2": "gemma3.Gemma3RotaryEmbedding",
    "e118428e1ef404ef": "qwen3_5.Qwen3_5TextRotaryEmbedding",
    "277b66442c54e58f": "llama4.Llama4TextRotaryEmbedding",  # stock's are complex numbers
}
# Rotations of queries and keys, with their styles (rotary.py).
ROTATIONS: dict[str, tuple[str, str]] = {
    "0d0c50f1105d8e96": ("llama.apply_rotary_pos_emb", "halves"),
    "2a6923c30a1abeab": ("olmo2.apply_rotary_pos_emb", "halves"),
    "b3e09a3de538b0f7": ("phi3.apply_rotary_pos_emb", "halves"),
    "383c187ffbb093be": ("qwen3_next.apply_rotary_pos_emb", "halves"),
    "74c9980384bea297": ("glm.apply_rotary_pos_emb", "pairs"),
    "4e38282fb48bafc4": ("gpt_oss.apply_rotary_pos_emb", "halves"),
    "92767ed84b5c69a8": ("ernie4_5.apply_rotary_pos_emb", "pairs"),
    "b907dfdd7ce839a2": ("helium.apply_rotary_pos_emb", "pairs"),
    "ea668671d462a4f5": ("modernbert.apply_rotary_pos_emb", "halves"),
}
# Norms whose result is multiplied by silu of a gate.
GATED_NORMS: dict[str, tuple[str, NormFormula]] = {
    "80995995be3e1df7": ("qwen3_next.Qwen3NextRMSNormGated", NormFormula(eps="variance_epsilon")),
}
# Linear attention by the gated delta rule (delta_net.py).
DELTA_NETS: dict[str, str] = {
    "4d734b2fbfcd3820": "qwen3_next.Qwen3NextGatedDeltaNet",
    "0449d35928db43c8": "qwen3_5.Qwen3_5GatedDeltaNet",
}
# Embeddings that are scaled, with the attribute that is the scale.
EMBEDDINGS: dict[str, tuple[str, str]] = {
    "40d585f5fccf16ce": ("gemma.GemmaTextScaledWordEmbedding", "embed_scale"),
}
# Attention whose keys and values are expanded from a latent row (attention.py).
LATENT_ATTENTIONS: dict[str, str] = {"4a178b5193fc71ea": "deepseek_v3.DeepseekV3Attention"}
# Attention whose queries have a factor of their position (attention.py).
TEMPERED_ATTENTIONS: dict[str, str] = {"b520bec6ed7d1240": "llama4.Llama4TextAttention"}
# down(act(gate(x)) · up(x)): gate and up as separate layers, or packed into one.
GATED_MLPS: dict[str, tuple[str, str]] = {
    "c667e32817f752bd": ("llama.LlamaMLP", "separate"),
    "89b34cccf0d0e128": ("phi3.Phi3MLP", "packed"),
    "a4d673915454fe59": ("llama4.Llama4TextMLP", "separate"),
}
# Routers of mixtures of experts, experts, and blocks that do more than call these two (experts.py).
ROUTERS: dict[str, tuple[str, Router]] = {
    "e7c8c51f3559493d": ("qwen3_moe.Qwen3MoeTopKRouter", Router("softmax", "norm_topk_prob")),
    "93b4378210e253b8": ("qwen3_5_moe.Qwen3_5MoeTopKRouter", Router("softmax")),
    "f06ff9c13a9b2c60": ("mixtral.MixtralTopKRouter", Router("softmax", rounded=False)),
    "72597766197b373e": (
        "deepseek_v3.DeepseekV3TopkRouter",
        Router("sigmoid", "norm_topk_prob", rounded=False, wide=True, grouped=True),
    ),
    "723fdbf549242d5f": ("gpt_oss.GptOssTopKRouter", Router("softmax_of_chosen")),
    "b7c9ecbf83abba9d": ("llama4.Llama4Router", Router("sigmoid_of_chosen", False)),
}
EXPERTS: dict[str, tuple[str, str]] = {
    "28e9f5cdbf106a43": ("mixtral.MixtralExperts", "gated"),
    "5f81d29a90289849": ("gpt_oss.GptOssExperts", "clamped"),
    "d94bd7032ffef491": ("llama4.Llama4TextExperts", "scaled inputs"),
}
MIXTURES: dict[str, tuple[str, str]] = {
    "4b370306a480439b": ("mixtral.MixtralSparseMoeBlock", "jittered"),
    "919acf8910d2ff36": ("qwen2_moe.Qwen2MoeSparseMoeBlock", "gated shared"),
    "e235a2b8d3ad7fea": ("deepseek_v3.DeepseekV3MoE", "shared"),
    "e8b1c65d4c1e1c06": ("llama4.Llama4TextMoe", "shared, with logits"),
}
# Modules that compute each element by itself, and run as they are.
ELEMENTWISE: dict[str, str] = {
    "2d2692a9c21d11b3": "activations.ReLUSquaredActivation",
}
# Attention blocks, layers, MLPs and backbones, which run their own code.
COMPOSITES: dict[str, str] = {
    "29067412e55de1f7": "llama.LlamaModel",
    "56851eb5314fe49a": "llama.LlamaDecoderLayer",
    "a35c9b3d8c61409f": "llama.LlamaAttention",
    "c232d2d7a6d341eb": "qwen2.Qwen2Model",
    "f9a024617a7fd2f0": "qwen2.Qwen2Attention",
    "c9600c86b25b84dd": "qwen3.Qwen3Attention",
    "0a5201288247e5f1": "mistral.MistralModel",
    "b2e82656f0335455": "mistral.MistralAttention",
    "364b8023ae1fd959": "ministral.MinistralModel",
    "ddcc10218045b72c": "olmo2.Olmo2DecoderLayer",
    "b602c894cd5a1b4d": "olmo2.Olmo2Attention",
    "89b5607c4ed0556e": "olmo3.Olmo3Model",
    "11960f0de85ef02f": "olmo3.Olmo3Attention",
    "e2393a56cb8c3bdc": "phi3.Phi3DecoderLayer",
    "a4352cad3e358b64": "phi3.Phi3Attention",
    "659ab0beaa774e53": "glm4.Glm4DecoderLayer",
    "96ded4e47e8fae79": "smollm3.SmolLM3Attention",
    "dc23b53d78834c8c": "granite.GraniteModel",
    "c8eb9762287b7d1b": "granite.GraniteDecoderLayer",
    "fe65b479e9ebd060": "gemma.GemmaModel",
    "bed9c52fb31cc60f": "gemma3.Gemma3TextModel",
    "616c4cee5761dd86": "gemma3.Gemma3DecoderLayer",
    "2b0033a4f46149a0": "gemma3.Gemma3Attention",
    "893606b9e5ad8484": "seed_oss.SeedOssAttention",
    "68f27345b141abc1": "seed_oss.SeedOssMLP",
    "db170b02b60da783": "arcee.ArceeMLP",
    "6a2db66ca674004b": "exaone4.Exaone4Model",
    "1ba2546c13ee185f": "exaone4.Exaone4Attention",
    "c6516f7d55a4225d": "cwm.CwmModel",
    "df02d2451cbe7bb8": "hunyuan_v1_dense.HunYuanDenseV1Attention",
    "a94493e726d12042": "starcoder2.Starcoder2Model",
    "fd57a0651769b52b": "starcoder2.Starcoder2Attention",
    "48bdf6cd43a64ecd": "starcoder2.Starcoder2MLP",
    "fcea2af513347668": "stablelm.StableLmModel",
    "71231f0f39e46be5": "stablelm.StableLmDecoderLayer",
    "f4963819f0ad076b": "stablelm.StableLmAttention",
    "bc54a718305292ef": "qwen3_next.Qwen3NextModel",
    "677d9ca614986a9d": "qwen3_next.Qwen3NextDecoderLayer",
    "5c9a68b60c5763e3": "qwen3_next.Qwen3NextAttention",
    "71c1ee34e3ada3d0": "qwen3_5.Qwen3_5TextModel",
    "7418e08c89eea76c": "qwen3_5.Qwen3_5DecoderLayer",
    "50ccb2d113d8a9c8": "qwen3_moe.Qwen3MoeSparseMoeBlock",
    "fc54b04a3d496be1": "mixtral.MixtralModel",
    "9d615a1d8ee4fc0a": "mixtral.MixtralDecoderLayer",
    "ebf2153447c470b6": "olmoe.OlmoeSparseMoeBlock",
    "7bceaa17dc011cef": "olmoe.OlmoeModel",
    "2ef642aabd1fcbf8": "olmoe.OlmoeAttention",
    "8d98e5d5c0640f01": "qwen2_moe.Qwen2MoeModel",
    "5dd5630d4a4f486b": "glm4_moe.Glm4MoeAttention",
    "6132bcf5a395a09d": "gpt_oss.GptOssModel",
    "51e54383f3b77e48": "gpt_oss.GptOssDecoderLayer",
    "1400bf10aa71bbac": "gpt_oss.GptOssAttention",
    "6cf319c1755af126": "gpt_oss.GptOssMLP",
    "ec267ab8ff4da67b": "gemma2.Gemma2Model",
    "dec778ed880d48e1": "gemma2.Gemma2Attention",
    "ad628821311ea75a": "modernbert.ModernBertModel",
    "edec019ee4836ac7": "modernbert.ModernBertEncoderLayer",
    "d0f77e8d05cefd5c": "modernbert.ModernBertAttention",
    "cdfc63c5b53c0ba4": "modernbert.ModernBertMLP",
    "e9ef22bb1fa69301": "modernbert.ModernBertEmbeddings",
    "f965fc04ae735210": "modernbert.ModernBertPredictionHead",
    "6e3b08ea70dd0f1f": "llama4.Llama4TextModel",
    "1a067f4802c12267": "llama4.Llama4TextDecoderLayer",
}
# Heads (heads.py).
HEADS: dict[str, tuple[str, str]] = {
    "09999c771af42fb9": ("llama.LlamaForCausalLM", "plain"),
    "c7f3393af93af7e9": ("granite.GraniteForCausalLM", "divided"),
    "c9f3a223d137befb": ("gemma3.Gemma3ForCausalLM", "capped"),
    "107ada47601edbb2": ("stablelm.StableLmForCausalLM", "plain"),
    "b087bb4d17afda49": ("qwen3_next.Qwen3NextForCausalLM", "routed"),
    "38ed8d5c462877bd": ("deepseek_v3.DeepseekV3ForCausalLM", "plain"),
    "f095779abe827079": ("cohere.CohereForCausalLM", "multiplied"),
    "4a22c65925c45e98": ("llama4.Llama4ForCausalLM", "plain"),
}
# Heads that score each sample, or each token; one forward of transformers serves all families.
SCORING_HEADS: dict[str, tuple[str, str]] = {
    "63fb572072b976a2": ("modeling_layers.GenericForSequenceClassification", "samples"),
    "6c94bbf30de817d2": ("modeling_layers.GenericForTokenClassification", "tokens"),
}
# Heads of encoders (task_heads.py).
ENCODER_HEADS: dict[str, tuple[str, str]] = {
    "262a5dfab71559b8": ("modernbert.ModernBertForMaskedLM", "masked"),
    "03329c461059a317": ("modernbert.ModernBertForSequenceClassification", "first token"),
    "aed54aced93f81f4": ("modernbert.ModernBertForTokenClassification", "every token"),
}
# PEFT's: the formula of [Note: adapters next to a weight].
LORA: dict[str, str] = {
    "fe3eb9f4a0b5f20c": "peft.tuners.lora.layer.Linear",
    "d612b2b12823325a": "peft.tuners.lora.layer.ParamWrapper",
}
