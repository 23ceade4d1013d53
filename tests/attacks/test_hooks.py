"""Hooks of an enabled model's modules run, or are refused; a backbone alone is refused, or watched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.gates.model.models import build_model

IDS = torch.arange(24).reshape(2, 12) % 128
FIRST = "model.layers.0"
O, DOWN = f"{FIRST}.self_attn.o_proj", f"{FIRST}.mlp.down_proj"
SHARED = [f"{FIRST}.self_attn.{c}_proj" for c in "qkv"] + [
    f"{FIRST}.mlp.{c}_proj" for c in ("gate", "up")
]


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    return copy.deepcopy(built)


def nothing(*_):
    pass


@pytest.mark.parametrize(
    "path",
    [*SHARED, O, DOWN, FIRST, f"{FIRST}.self_attn.q_norm", "model.norm", "model", "lm_head"],
)
def test_a_hook_of_a_called_module_runs(model, path):
    isobit.enable(model)
    expected = model(IDS).logits
    ran = []
    hook = model.get_submodule(path).register_forward_hook(lambda *_: ran.append(path))
    assert bits.equal(model(IDS).logits, expected)
    assert ran == [path]
    hook.remove()


@pytest.mark.parametrize("path", SHARED)
def test_a_hook_before_a_linear_that_shares_its_input_changes_its_own_input_only(model, path):
    """The others are computed again with the input that they have."""
    isobit.enable(model)
    layer = model.get_submodule(path)
    seen = {}
    hooks = [
        model.get_submodule(other).register_forward_hook(
            lambda _, __, output, other=other: seen.__setitem__(other, output.detach())
        )
        for other in SHARED
        if other.rpartition(".")[0] == path.rpartition(".")[0]
    ]
    model(IDS)
    plain = dict(seen)
    hooks.append(layer.register_forward_pre_hook(lambda _, given: (given[0] * 2.0,)))
    model(IDS)
    for other, output in seen.items():
        wanted = plain[other] * 2.0 if other == path else plain[other]
        assert bits.equal(output, wanted), (
            other
        )  # there is no bias: twice the input is twice the sum
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("path", SHARED)
def test_gradients_are_those_of_stock_with_a_backward_hook_on_a_shared_linear(model, path):
    stock = copy.deepcopy(model)
    stock(IDS, labels=IDS).loss.backward()
    isobit.enable(model, strict=False)  # strict mode watches no backward hooks, and raises for them
    seen = []
    model.get_submodule(path).register_full_backward_hook(lambda *_: seen.append(path))
    model(IDS, labels=IDS).loss.backward()
    assert seen == [path]
    for (name, mine), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4, msg=name)


def stock_mean(_, __, output):
    return output - output.mean(dim=(0, 1), keepdim=True)


@pytest.mark.parametrize("warm", [False, True])
def test_a_stock_operator_of_a_hook_is_found_whenever_it_comes(model, warm):
    isobit.enable(model)
    if warm:
        model(IDS)
        isobit.logprobs(model, IDS)
    hook = model.get_submodule(DOWN).register_forward_hook(stock_mean)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"(?s)aten::mean in .*down_proj"):
            model(IDS)
        with pytest.raises(UnsupportedError, match=r"aten::mean"):
            isobit.logprobs(model, IDS)
    hook.remove()
    model(IDS)


def test_one_hook_in_the_place_of_another_is_watched_too(model):
    isobit.enable(model)
    layer = model.get_submodule(DOWN)
    first = layer.register_forward_hook(lambda _, __, output: output * 2.0)
    model(IDS)
    first.remove()
    layer.register_forward_hook(stock_mean)
    with pytest.raises(UnsupportedError, match="aten::mean"):
        model(IDS)


def test_a_hook_of_the_head_is_refused_where_the_head_is_not_called(model):
    isobit.enable(model)
    hook = model.lm_head.register_forward_hook(nothing)
    model(IDS)
    with pytest.raises(UnsupportedError, match="no hook on lm_head"):
        model(IDS, labels=IDS)
    with pytest.raises(UnsupportedError, match="no hook on lm_head"):
        isobit.logprobs(model, IDS)
    hook.remove()
    isobit.logprobs(model, IDS)


def test_a_hook_of_the_model_is_refused_where_the_model_is_not_called(model):
    isobit.enable(model)
    ran = []
    model.register_forward_hook(lambda *_: ran.append(1))
    model(IDS)
    assert ran == [1]
    with pytest.raises(UnsupportedError, match="no hook on the model itself"):
        isobit.logprobs(model, IDS)


def test_global_hooks_are_refused_in_strict_mode(model):
    isobit.enable(model)
    expected = model(IDS).logits
    hook = nn.modules.module.register_module_forward_hook(nothing)
    try:
        with pytest.raises(UnsupportedError, match="global module hooks"):
            model(IDS)
    finally:
        hook.remove()
    assert bits.equal(model(IDS).logits, expected)


# ---- the backbone alone ----------------------------------------------------------------------------------


def test_a_head_of_stock_over_an_enabled_backbone_is_refused(model):
    """As a trainer does that puts its own forward over the model's: backbone, then a stock product."""
    isobit.enable(model)
    original = model.forward

    def fused(ids, fused=False, **named):
        if not fused:
            return original(ids, **named)
        return F.linear(
            model.base_model(ids, use_cache=False).last_hidden_state, model.lm_head.weight
        )

    expected = model(IDS).logits
    model.forward = fused
    assert bits.equal(model(IDS).logits, expected)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"(?s)backbone|alone.*isobit\.logprobs"):
            model(IDS, fused=True)
    assert isobit.logprobs(model, IDS).isfinite().all()


def test_a_backbone_that_was_enabled_itself_may_be_called_alone_and_is_watched(model):
    isobit.enable(model)
    isobit.enable(model.model)
    together = model.model(IDS).last_hidden_state
    assert bits.equal(together[:1], model.model(IDS[:1]).last_hidden_state)
    model.model.norm.register_forward_hook(stock_mean)
    with pytest.raises(UnsupportedError, match="aten::mean"):
        model.model(IDS)
    model.model.norm._forward_hooks.clear()
    isobit.disable(model.model)
    with pytest.raises(UnsupportedError, match="alone"):
        model.model(IDS)
    isobit.disable(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_backbone_may_be_enabled_first(model):
    isobit.enable(model.model)
    isobit.enable(model)
    expected = model(IDS, output_hidden_states=True).hidden_states[-1]
    assert bits.equal(model.model(IDS).last_hidden_state, expected)
    isobit.disable(model)
    assert bits.equal(model.model(IDS).last_hidden_state, expected)
    isobit.disable(model.model)
    assert not any("forward" in vars(module) for module in model.modules())
