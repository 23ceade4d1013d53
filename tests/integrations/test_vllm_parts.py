"""Parts of the vLLM integration that run without vLLM: what is refused, how tokens are drawn, and that each module has
the bits of the trainer's. The engine itself is in tests/vllm (./check --full).
"""

import types

import pytest
import torch
from transformers import (
    AutoModel,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import isobit
from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.parts.rotary import forward_rotary
from isobit.integrations.vllm import enabling, modules, package, plugin, refusals, sampler, weights
from isobit.ops import dispatch
from isobit.ops.linear.op import linear_fp32
from isobit.ops.registration import launch


def params(**given):
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3, "extra_args": None}
    return types.SimpleNamespace(**{**plain, **given})


def engine(**given):
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "is_multimodal_model": False,
        "runner_type": "generate",
        "hf_text_config": types.SimpleNamespace(hidden_act="silu"),
        "dtype": torch.bfloat16,
        "quantization": None,
        "enforce_eager": True,
        "logprobs_mode": refusals.LOGPROBS,
        "logits_processors": None,
    }
    config = {
        "quant_config": None,
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "weight_transfer_config": None,
        "watermark_config": None,
        "parallel_config": types.SimpleNamespace(tensor_parallel_size=1),
        "cache_config": types.SimpleNamespace(cache_dtype="auto"),
        "device_config": types.SimpleNamespace(device_type="cpu"),
        "use_v2_model_runner": False,
    }
    config.update({name: value for name, value in given.items() if name in config})
    model.update({name: value for name, value in given.items() if name in model})
    return types.SimpleNamespace(**config, model_config=types.SimpleNamespace(**model))


WRONG_ENGINES = {
    "tensor_parallel_size": {"parallel_config": types.SimpleNamespace(tensor_parallel_size=2)},
    "quantization": {"quantization": "fp8"},
    "LoRA": {"lora_config": object()},
    "speculative": {"speculative_config": object()},
    "KV connector": {"kv_transfer_config": object()},
    "logits_processors": {"logits_processors": ["mine:Processor"]},
    "watermark_config": {"watermark_config": object()},
    "backend 'nccl'": {"weight_transfer_config": types.SimpleNamespace(backend="nccl")},
    "enforce_eager": {"enforce_eager": False},
    "kv_cache_dtype": {"cache_config": types.SimpleNamespace(cache_dtype="fp8")},
    "prefix caching": {
        "cache_config": types.SimpleNamespace(cache_dtype="auto", mamba_cache_mode="align")
    },
    "device": {"device_config": types.SimpleNamespace(device_type="cuda")},
    "model runner V2": {"use_v2_model_runner": True},
    "logprobs_mode": {"logprobs_mode": "raw_logprobs"},
    "ForSequenceClassification": {"architectures": ["MistralForSequenceClassification"]},
    "multi-modal": {"is_multimodal_model": True},
    "runner": {"runner_type": "pooling"},
    "rope_type": {
        "hf_text_config": types.SimpleNamespace(rope_parameters={"rope_type": "dynamic"})
    },
    "is_causal": {"hf_text_config": types.SimpleNamespace(is_causal=False)},
}


@pytest.mark.parametrize("word", WRONG_ENGINES)
def test_engine_that_is_not_computed_is_refused_by_name(word):
    refusals.check_engine(engine())
    with pytest.raises(UnsupportedError, match=word) as raised:
        refusals.check_engine(engine(**WRONG_ENGINES[word]))
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.2),
        ("min_p", 0.1),
        ("min_tokens", 4),
        ("logit_bias", {3: 1.0}),
        ("allowed_token_ids", [1, 2]),
        ("bad_words", ["no"]),
        ("structured_outputs", object()),
        ("logprob_token_ids", [1]),
        ("prompt_logprob_token_ids", torch.ones(2, 2)),
        ("thinking_token_budget", 0),
        ("trace_decode_token_ids", [4]),
        ("watermarking", True),
        ("extra_args", {"isobit_requests": 4}),
        ("extra_args", {"isobit_request": "4"}),
    ],
)
def test_request_that_no_trainer_scores_is_refused_by_name(name, value):
    refusals.check_request(params(bad_words=[], logit_bias={}, watermarking=False, min_p=0))
    with pytest.raises(ArgumentError, match="isobit_request" if name == "extra_args" else name):
        refusals.check_request(params(**{name: value}))


def test_draws_need_a_seed_and_greedy_does_not():
    with pytest.raises(ArgumentError, match="seed"):
        refusals.check_request(params(seed=None))
    refusals.check_request(params(seed=None, temperature=0.0))


def test_requests_are_checked_for_isobits_worker_alone_and_once():
    class Processor:
        def __init__(self, worker):
            parallel = types.SimpleNamespace(worker_cls=worker)
            self.vllm_config = types.SimpleNamespace(parallel_config=parallel)

        def _validate_params(self, given, tasks):
            return "stock"

    plugin.check_requests(Processor, LookupError)
    installed = Processor._validate_params
    plugin.check_requests(Processor, LookupError)
    assert Processor._validate_params is installed
    assert Processor("auto")._validate_params(params(seed=None), ()) == "stock"
    assert Processor(refusals.WORKER)._validate_params(params(), ()) == "stock"
    with pytest.raises(LookupError, match="seed"):
        Processor(refusals.WORKER)._validate_params(params(seed=None), ())


def test_engines_are_checked_where_they_are_configured_and_once():
    class Arguments:
        def __init__(self, dtype="auto", worker=refusals.WORKER, **given):
            self.dtype, self.worker, self.given = dtype, worker, given

        def create_engine_config(self):
            config = engine(**self.given)
            config.parallel_config.worker_cls = self.worker
            config.model_config.hf_config = types.SimpleNamespace(dtype=torch.float32)
            return config

    plugin.check_configurations(Arguments)
    installed = Arguments.create_engine_config
    plugin.check_configurations(Arguments)
    assert Arguments.create_engine_config is installed
    Arguments("bfloat16").create_engine_config()
    Arguments(dtype=torch.float32, worker="auto", quantization="fp8").create_engine_config()
    with pytest.raises(UnsupportedError, match="turns float32 into bfloat16"):
        Arguments().create_engine_config()
    with pytest.raises(UnsupportedError, match="quantization"):
        Arguments("bfloat16", quantization="fp8").create_engine_config()


def test_versions_and_plugins_are_checked():
    package.check_version("0.32.0")
    for other in ("0.31.9", "0.33.0", "1.32.0"):
        with pytest.raises(UnsupportedError, match=other):
            package.check_version(other)
    enabling.check_plugins(None)
    enabling.check_plugins(["other", "isobit"])
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        enabling.check_plugins(["other"])
    assert isobit.integrations.vllm.engine_arguments()["worker_cls"] == refusals.WORKER


# ---- draws --------------------------------------------------------------------------------------------------


def test_draw_depends_on_its_own_key_and_equals_keyed_sampling():
    logits = torch.randn(6, 301, generator=torch.Generator().manual_seed(0)) * 4
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 0.9)] * 2
    draws = [
        sampler.read_draw(params(temperature=t, top_k=k, top_p=p, seed=row), 10 + row)
        for row, (t, k, p) in enumerate(kinds)
    ]
    tokens, policy = sampler.draw_tokens(logits, draws)
    order = [4, 0, 5, 2]
    some, some_policy = sampler.draw_tokens(logits[order], [draws[row] for row in order])
    assert torch.equal(some, tokens[order])
    assert torch.equal(some_policy, policy[order])
    for row, (temperature, top_k, top_p) in enumerate(kinds):
        if temperature:
            keyed = isobit.KeyedSampling(
                row, temperature, top_k or None, top_p, samples=[0], attention_mask=None
            )
            ids = torch.zeros(1, 10 + row, dtype=torch.int64)
            assert int(keyed(ids, logits[row : row + 1]).argmax()) == int(tokens[row])
    other = sampler.draw_tokens(logits, [sampler.read_draw(params(seed=99), 5)] * 6)[0]
    assert not torch.equal(other, tokens)


def test_policy_is_scaled_truncated_and_renormalised_and_greedy_is_the_model():
    logits = torch.randn(2, 301, generator=torch.Generator().manual_seed(1)) * 4
    draws = [
        sampler.read_draw(params(temperature=0.7, top_k=5, seed=1), 4),
        sampler.read_draw(params(temperature=0.0), 4),
    ]
    tokens, policy = sampler.draw_tokens(logits, draws)
    found = sampler.policy_logprobs(policy)
    assert int((policy[0] > -torch.inf).sum()) == 5
    assert abs(float(found[0].exp().sum()) - 1) < 1e-5
    assert torch.equal(found[1], isobit.log_softmax(logits[1]))
    assert int(tokens[1]) == int(logits[1].argmax())
    unscored = isobit.log_softmax(
        logits[0]
    )  # trl#6789's mistake: the whole vocabulary, no temperature
    assert float(unscored[tokens[0]]) != float(found[0, tokens[0]])


def test_greedy_tie_is_broken_by_the_lowest_id():
    logits = torch.zeros(1, 40)
    logits[0, [7, 21, 33]] = 2.0
    assert (
        sampler.draw_tokens(logits, [sampler.read_draw(params(temperature=0.0), 1)])[0].item() == 7
    )


# ---- modules: the trainer's bits, and vLLM's own rounding as the control -------------------------------------


def wide(*shape, dtype=torch.bfloat16, seed=0):
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*shape, generator=made) * 2.0 ** torch.randint(-4, 5, shape, generator=made)
    ).to(dtype)


def test_norm_takes_the_rounded_sum():
    module = types.SimpleNamespace(weight=wide(256, seed=2), variance_epsilon=1e-6)
    x, residual = wide(9, 256), wide(9, 256, seed=1)
    normed, stream = modules.forward_norm(module, x, residual)
    assert torch.equal(stream, residual + x)
    assert torch.equal(normed, isobit.rms_norm(residual + x, module.weight, 1e-6))
    unrounded = isobit.rms_norm(
        residual.float() + x.float(), module.weight.float(), 1e-6
    ).bfloat16()
    assert int((unrounded != normed).sum()) > 0


def test_norm_with_an_offset_and_geglu_have_the_trainers_bits():
    """Those of the classes that transformers has for the same layers, enabled."""
    config = GemmaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    model.norm.weight.data = wide(64, seed=3)
    seen = {}
    layer = model.layers[0]
    for name, module in (("norm", model.norm), ("mlp", layer.mlp), ("down", layer.mlp.down_proj)):
        module.register_forward_hook(
            lambda _, given, y, name=name: seen.update({name: (given[0], y)})
        )
    with torch.no_grad():
        isobit.enable(model)(torch.arange(9)[None])
    x, y = seen["norm"]
    plain = types.SimpleNamespace(weight=model.norm.weight.detach(), variance_epsilon=1e-6)
    assert torch.equal(modules.forward_offset_norm(plain, x), y)
    normed, stream = modules.forward_offset_norm(plain, x, x)
    assert torch.equal(stream, x + x)
    assert torch.equal(normed, isobit.rms_norm(stream, plain.weight, 1e-6, offset=1.0))
    given, (product, _) = seen["mlp"][0], seen["down"]
    gate_up = torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight))
    fused = weights.PackedLinear().compute(given, gate_up.detach(), None)
    found = modules.forward_geglu(types.SimpleNamespace(approximate="tanh"), fused)
    assert torch.equal(found, product)


def test_models_with_several_tables_of_frequencies_are_refused():
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, vocab_size=64)
    with pytest.raises(UnsupportedError, match="one table of rotary frequencies"):
        modules.read_frequencies(config)


def test_logits_are_scaled_exactly():
    head, hidden = wide(40, 32, seed=1), wide(5, 32)
    for scale in (1.0, 0.125):
        module = types.SimpleNamespace(org_vocab_size=39, scale=scale)
        layer = types.SimpleNamespace(weight=head)
        found = modules.forward_logits(module, weights.PackedLinear(), layer, hidden)
        assert torch.equal(found, linear_fp32(hidden, head)[:, :39] * scale)


def test_rotary_has_the_trainers_table():
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    ours, positions = LlamaConfig(**sizes), torch.tensor([5, 0, 301, 40])
    module = modules.OrderedRotary(*modules.read_frequencies(ours), 64)
    query, key = wide(4, 128), wide(4, 64, seed=1)
    turned, turned_key = module(positions, query, key)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cos, sin = forward_rotary(LlamaRotaryEmbedding(config=ours), query, positions[None])
    assert torch.equal(turned.view(4, 2, 64), isobit.rotary(query.view(4, 2, 64), cos[0], sin[0]))
    assert torch.equal(turned_key.view(4, 1, 64), isobit.rotary(key.view(4, 1, 64), cos[0], sin[0]))
    rounded = [t.bfloat16() for t in (cos[0], sin[0])]  # vLLM's table
    assert not torch.equal(turned.view(4, 2, 64), isobit.rotary(query.view(4, 2, 64), *rounded))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        frequencies, _ = modules.read_frequencies(ours)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(frequencies, module._frequencies)


def test_fused_layers_have_the_bits_of_the_split_ones():
    x, weight = wide(7, 64), wide(3 * 48, 64, seed=1)
    fused = weights.PackedLinear().compute(x, weight, None)
    parts = [isobit.linear(x, part) for part in weight.split(48)]
    assert torch.equal(fused, torch.cat(parts, dim=-1))
    gate_up = wide(7, 96, seed=2)
    assert torch.equal(modules.forward_swiglu(None, gate_up), isobit.swiglu(*gate_up.chunk(2, -1)))


def test_head_and_embedding_leave_out_vllms_padding():
    table, hidden = wide(64, 32), wide(5, 32, seed=1)
    head = types.SimpleNamespace(weight=table)
    module = types.SimpleNamespace(scale=1.0, org_vocab_size=50, weight=table)
    packed = weights.PackedLinear()
    logits = modules.forward_logits(module, packed, head, hidden)
    assert packed.is_packed == dispatch.has_native()
    assert torch.equal(logits, linear_fp32(hidden, table.clone())[:, :50])
    assert logits.shape == (5, 50)
    assert logits.dtype == torch.float32
    targets = torch.tensor([0, 3, 49, 7, 7])
    scored = isobit.linear_logprob(hidden, table[:50], targets)
    assert torch.equal(isobit.log_softmax(logits)[torch.arange(5), targets], scored)
    ids = torch.tensor([3, 49], dtype=torch.int32)
    assert torch.equal(modules.forward_embedding(module, ids), table[[3, 49]])
    with pytest.raises(ArgumentError):
        modules.forward_embedding(module, torch.tensor([50]))
    with pytest.raises(UnsupportedError, match="bias"):
        modules.forward_logits(module, packed, head, hidden, embedding_bias=table[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_beside_values_in_pages_of_nan_have_the_bits_of_plain_rows(dtype):
    """vLLM's cache as the backend reads it: pages in any order, depth of keys and values side by side."""
    k, v, q = (
        wide(70, 2, 64, dtype=dtype),
        wide(70, 2, 64, dtype=dtype, seed=1),
        wide(3, 4, 64, dtype=dtype),
    )
    cache, pages = torch.full((256, 2, 128), torch.nan, dtype=dtype), (128, 0)
    for at in range(70):
        row = pages[at // 64] + at % 64
        cache[row] = torch.cat((k[at], v[at]), dim=-1)
    tables = (torch.tensor([[0, 3]]), torch.tensor([pages]), torch.tensor([70]))
    sizes = (3, 4, 64, 256, 2)
    found, _ = launch(
        "attention", sizes, q, cache[..., :64], cache[..., 64:], *tables, 0.125, True, 0
    )
    assert torch.equal(found, isobit.attention(q, k, v, is_causal=True, scale=0.125))


def test_model_that_is_cast_keeps_its_frequencies_unrounded_or_differs_from_vllms():
    """A checkpoint has no frequencies: vLLM computes them in fp32, so a trainer that rounds them is another model."""
    config = Qwen3Config(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16
    )
    cast = Qwen3ForCausalLM(config).to(torch.bfloat16).model.rotary_emb.inv_freq
    expected, _ = modules.read_frequencies(config)
    assert cast.dtype in (torch.float32, torch.bfloat16)
    assert torch.equal(cast.float(), expected) == (cast.dtype == torch.float32)
