"""How each operator that `isobit check --like` knows is called; without torch, for the help."""

from __future__ import annotations

LIKE = {
    "attention": "attention(q, k, v, is_causal=True), of [samples, heads, tokens, depth]",
    "cross_entropy": "cross_entropy(logits, targets), a loss per row, 0 where a target is -100",
    "embedding": "embedding(ids, weight)",
    "gelu": "gelu(x)",
    "gqa": "gqa(q, k, v, is_causal=True), of [samples, heads, tokens, depth], fewer heads in k and v",
    "layer_norm": "layer_norm(x, weight, bias), eps = 1e-5",
    "linear": "linear(x, weight, bias)",
    "log_softmax": "log_softmax(x), over the last axis",
    "logprob": "logprob(hidden, weight, targets), 0 where a target is -100",
    "rms_norm": "rms_norm(x, weight), eps = 1e-6",
    "rope": "rope(x, cos, sin), x of [samples, heads, tokens, depth], cos and sin of [samples, tokens, depth]",
    "silu": "silu(x)",
    "softmax": "softmax(x), over the last axis",
    "swiglu": "swiglu(gate, up)",
}

# Tools of post-training, each with the contract that judges it, in library/post_training.
TOOLS = {
    "merge": "merge(base, a, b, method=, weight=, density=, t=, name=), methods linear, slerp, task_arithmetic, ties, "
    "dare_linear",
    "prune": "prune(weight, sparsity)",
    "quantize": "quantize(x), codes, scale and zero of four bits in groups of 16",
    "quantize_fp8": "quantize(x), codes of e4m3, scale per row, zero of 0",
    "quantize_int8": "quantize(x), codes of int8, scale per row, zero of 0",
    "tokenizer": "a tokenizer.json, or a function that returns a tokenizer",
}
CONTRACT_OF = {
    "merge": "merging",
    "prune": "pruning",
    "quantize": "quantising",
    "quantize_fp8": "quantising",
    "quantize_int8": "quantising",
    "tokenizer": "tokenizing",
}
