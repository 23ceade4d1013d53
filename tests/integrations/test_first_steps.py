"""What people try first, and in the wrong way, is answered in words that help."""

import sys

import pytest
import torch
import transformers
from torch import nn
from transformers import cache_utils

import isobit
from isobit.errors import UnsupportedError
from isobit.gates.model.models import TINY, build_model
from isobit.integrations.transformers.package import check_version
from isobit.integrations.transformers.state import find_state

IDS = torch.arange(24).reshape(2, 12) % 128


def test_enable_returns_the_model():
    model = build_model("qwen3-tiny", torch.float32)
    assert isobit.enable(model) is model
    assert model.generate(IDS, max_new_tokens=1, do_sample=False).shape == (2, 13)
    assert isobit.disable(model) is model
    assert find_state(model) is None


def test_a_name_is_not_a_model():
    with pytest.raises(UnsupportedError, match=r'from_pretrained\("Qwen/Qwen3-0\.6B"\)'):
        isobit.enable("Qwen/Qwen3-0.6B")
    with pytest.raises(UnsupportedError, match="received: dict"):
        isobit.enable({})


@pytest.mark.parametrize("version", ["4.57.1", "5.21.0", "5.23.0", "6.0.0", "5"])
def test_another_version_of_transformers_is_refused_before_anything_else(monkeypatch, version):
    model = build_model("qwen3-tiny", torch.float32)
    # transformers replaces itself in sys.modules while a model is built for the first time.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(
        UnsupportedError,
        match=rf"transformers {version}\n  remedy: pip install 'transformers>=5\.22,<5\.23'",
    ):
        isobit.enable(model)


def test_the_range_is_the_package_s_own():
    for version in ("5.22.0", "5.22.2"):
        check_version(version)
    text = (__import__("pathlib").Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"transformers>=5.22,<5.23"' in text


def test_unknown_parts_are_named_as_such():
    sizes = {**TINY, "num_hidden_layers": 1}
    others = {
        "Qwen3ForQuestionAnswering": transformers.Qwen3ForQuestionAnswering(
            transformers.Qwen3Config(**sizes, head_dim=16)
        ),
        "GraniteMoe": transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**sizes)),
        "Linear": nn.Linear(2, 2),
    }
    for name, other in others.items():
        with pytest.raises(UnsupportedError, match=rf"(?s)received: \S.*{name}") as refused:
            isobit.enable(other)
        assert "a wrapper" not in str(refused.value)


def test_wrappers_are_named_as_such():
    model = build_model("qwen3-tiny", torch.float32)
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)a wrapper, .*DataParallel\n  remedy: pass the model itself, wrapper\.module",
    ):
        isobit.enable(nn.DataParallel(model))
    with pytest.raises(UnsupportedError, match=r"(?s)compiled model.*enable the model first"):
        isobit.enable(torch.compile(model))


class Rounded(cache_utils.QuantizedLayer):
    """A layer of a quantised cache that needs no further package."""

    def _quantize(self, tensor, axis):
        return tensor.round()

    def _dequantize(self, tensor):
        return tensor


class Doubled(cache_utils.DynamicCache):
    """A cache of somebody's own that changes keys."""

    def update(self, keys, values, *more, **named):
        return super().update(keys * 2, values, *more, **named)


CACHES = {
    "a quantised layer": lambda config: cache_utils.Cache(
        layers=[Rounded(residual_length=2) for _ in range(config.num_hidden_layers)]
    ),
    # Its scale is that of the largest key of the batch.
    "fp8": lambda config: cache_utils.QuantizedCache("fp8", config),
    "made at the first update": lambda config: cache_utils.Cache(
        layer_class_to_replicate=cache_utils.Fp8QuantizedLayer
    ),
    "one's own": lambda config: Doubled(),
    "a cache of caches": lambda config: cache_utils.EncoderDecoderCache(
        cache_utils.DynamicCache(), cache_utils.DynamicCache()
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_changes_keys_is_refused(name):
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    ids = torch.arange(12).reshape(2, 6)
    cache = CACHES[name](model.config)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"(?s)fewer bits.*DynamicCache"):
        model(ids, past_key_values=cache)
    with torch.no_grad():
        cache = cache_utils.DynamicCache()
        model(ids[:, :4], past_key_values=cache)
        decoded = model(ids[:, 4:], past_key_values=cache).logits
        assert isobit.bits.equal(decoded, model(ids).logits[:, 4:])


@pytest.mark.parametrize("name", ["static", "offloaded_static"])
def test_generate_with_a_static_cache_is_refused(name):
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    with pytest.raises(UnsupportedError, match=r"(?s)static cache.*DynamicCache"):
        model.generate(torch.arange(1, 5)[None], max_new_tokens=2, cache_implementation=name)


def test_a_compiled_forward_has_the_bits_of_the_model():
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
        model.forward = torch.compile(model.forward, backend="aot_eager")
        assert isobit.bits.equal(model(ids).logits, expected)


class Holder(nn.Module):
    """A module with a model in it, as a LightningModule is."""

    def __init__(self, model):
        super().__init__()
        self.policy = model


def test_a_module_that_has_a_model_is_told_where_it_is():
    holder = Holder(build_model("qwen3-tiny", torch.float32))
    with pytest.raises(UnsupportedError, match=r"remedy: pass .* isobit\.enable\(module\.policy\)"):
        isobit.enable(holder)
    isobit.enable(holder.policy)


class Own(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, scale=1.0):
        return {"out": [self.layer(x) * scale]}


def test_coverage_of_any_module():
    x = torch.randn(3, 4)
    for batch in (x, (x, 2.0), {"x": x, "scale": 2.0}):
        stock = isobit.coverage_report(Own(nn.Linear(4, 4)), batch)
        assert {"aten::addmm", "Addmm"} <= {use.operator for use in stock.order_dependent}
        assert isobit.coverage_report(Own(isobit.nn.Linear(4, 4)), batch).kept
    held = isobit.nn.Linear(4, 4)
    isobit.coverage_report(held, x)
    assert held.weight.grad is None
