"""Strict mode is not deceived: names that pretend, hooks that run later, NumPy, flushed subnormals; NaN is one NaN."""

import copy
import threading

import pytest
import torch
from torch import nn

import isobit
from isobit import bits
from isobit.errors import ArgumentError, UnsupportedError
from isobit.gates.model.models import build_model
from isobit.integrations.transformers.residual import fork
from isobit.integrations.transformers.strictness import observe, walk_gradients

IDS = torch.arange(24).reshape(2, 12) % 128


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    model = copy.deepcopy(built)
    isobit.enable(model)
    return model


# ---- what hides -------------------------------------------------------------------------------------------

_kept = []  # libraries: what they define goes with them


def define(space, name="deceives"):
    library = torch.library.Library(space, "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x - x.mean(dim=(0, 1), keepdim=True), "CPU")
    _kept.append(library)
    return getattr(getattr(torch.ops, space), name)


@pytest.mark.parametrize("space", ["isobit", "profiler"])
def test_an_operator_in_a_trusted_namespace_is_not_trusted_for_it(model, space):
    theirs = define(space)
    model.model.layers[0].register_forward_hook(lambda _, __, output: theirs(output))
    with pytest.raises(UnsupportedError, match=rf"{space}::deceives in model\.layers\.0"):
        model(IDS)


def test_a_custom_operator_that_takes_our_name_is_not_ours():
    @torch.library.custom_op("isobit::pretends", mutates_args=())
    def pretends(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()

    pretends.register_autograd(lambda ctx, grad: grad * grad.sum())
    x = torch.randn(3, requires_grad=True)
    with observe() as seen:
        y = pretends(x)
    assert [use.operator for use in seen.coverage().order_dependent] == ["isobit::pretends"]
    assert [use.operator for use in walk_gradients(y)] == [
        "GeneratedBackwardFor_isobit_pretends_default"
    ]


def test_formulas_in_cpp_are_ours_and_other_nodes_in_cpp_are_not():
    x = torch.randn(3, 4, requires_grad=True)
    ours = (isobit.softmax, isobit.log_softmax, isobit.silu, isobit.gelu)
    for y in (*(call(x) for call in ours), isobit.swiglu(x, x)):
        assert walk_gradients(y) == []
    for theirs in (torch.softmax, torch.log_softmax):  # their gradients add along a row
        assert len(walk_gradients(theirs(x, -1))) == 1


def test_ranges_of_the_profiler_are_still_free(model):
    def hook(_, __, output):
        with torch.profiler.record_function("a range"):
            return output * 1.0

    model.model.layers[0].register_forward_hook(hook)
    model(IDS)


class Pretends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum()


@pytest.mark.parametrize("module", ["isobit.nowhere", "isobit.integrations.transformers.residual"])
def test_a_function_that_says_it_is_of_isobit_is_not(model, module, monkeypatch):
    monkeypatch.setattr(Pretends, "__module__", module)
    model.train().model.layers[0].register_forward_hook(
        lambda _, __, output: Pretends.apply(output)
    )
    with pytest.raises(UnsupportedError, match="Pretends in the gradient's graph"):
        model(IDS, labels=IDS, use_cache=False)


LEAVES = {
    "a tensor hook": (
        lambda output: output.register_hook(lambda grad: grad - grad.mean()),
        "no tensor hook",
    ),
    "NumPy": (lambda output: output.detach().numpy().mean(), "NumPy"),
    "an array": (lambda output: __import__("numpy").asarray(output.detach()), "NumPy"),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_what_leaves_the_watch_is_refused(model, name, warm):
    leave, said = LEAVES[name]
    model.train()
    if warm:
        model(IDS, labels=IDS, use_cache=False)
    model.model.layers[0].register_forward_hook(lambda _, __, output: (leave(output), None)[1])
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"(?s){said}"):
            model(IDS, labels=IDS, use_cache=False)


@pytest.mark.parametrize("warm", [False, True])
def test_a_backward_hook_of_a_called_module_is_refused(model, warm):
    model.train()
    if warm:
        model(IDS, labels=IDS, use_cache=False)
    model.model.layers[0].register_full_backward_hook(
        lambda _, grads, __: tuple(g * g.norm() for g in grads)
    )
    with pytest.raises(UnsupportedError, match="BackwardHook"):
        model(IDS, labels=IDS, use_cache=False)


def test_watching_in_one_thread_keeps_the_gradients_of_another(model):
    """The watch of a new kind of call must not touch what a backward in another thread writes."""
    model.train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        model._isobit_state.strictness.forget()
        other = threading.Thread(target=lambda: isobit.logprobs(model, IDS).sum())
        other.start()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        other.join()
        assert all(
            bits.equal(p.grad, wanted)
            for p, wanted in zip(model.parameters(), expected, strict=True)
        )


# ---- numbers that are not normal --------------------------------------------------------------------------


def test_flushed_subnormals_are_refused_at_every_call(model):
    with torch.no_grad():
        expected = model(IDS).logits
        torch.set_flush_denormal(True)
        try:
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=r"torch\.set_flush_denormal\(False\)"):
                    model(IDS)
                with pytest.raises(UnsupportedError, match="subnormal"):
                    isobit.logprobs(model, IDS)
        finally:
            torch.set_flush_denormal(False)
        assert bits.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_in_the_residual_stream_is_one_nan(built, dtype, value):
    model = copy.deepcopy(built).to(dtype)
    ids = torch.randint(1, 128, (3, 43), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:] = (
            value  # inf - inf where the stream has another sign
        )
        model.model.embed_tokens.weight[ids[0, 5]] = -value
        with isobit.enabled(model):
            alone, among = (
                model(part, output_hidden_states=True).hidden_states for part in (ids[:1], ids)
            )
    assert all(bits.equal(a, b[:1]) for a, b in zip(alone, among, strict=True))
    seen = among[1][among[1].isnan()]
    assert len(seen)
    assert bits.equal(seen, torch.full_like(seen, float("nan")))


def test_nan_in_the_gradient_of_the_stream_is_one_nan():
    x = torch.zeros(3, 33, dtype=torch.bfloat16, requires_grad=True)
    nan = torch.full((3, 33), float("nan"), dtype=torch.bfloat16)
    torch.autograd.backward(list(fork(x)), [nan.clone(), nan.clone()])
    assert bits.equal(x.grad, nan)
    whole = torch.zeros(3, 33, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward(
        [whole.view_as(whole), whole.view_as(whole)], [nan.clone(), nan.clone()]
    )
    assert not bits.equal(whole.grad, nan)  # the control: autograd's own addition


def test_negative_positions_are_refused_and_those_of_padding_are_not_read(model):
    positions = torch.arange(12).expand(2, 12)
    with pytest.raises(ArgumentError, match=r"(?s)position -5.*remedy"):
        model(IDS, position_ids=positions - 5)
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    counted = mask.cumsum(-1) - 1  # -1 at padding, as users write it
    with torch.no_grad():
        found = model(IDS, attention_mask=mask, position_ids=counted).logits[:, 3:]
        assert bits.equal(found, model(IDS[:, 3:]).logits)


def test_angles_follow_the_scaling(built):
    first, second = copy.deepcopy(built), copy.deepcopy(built)
    for model in (first, second):
        isobit.enable(model)
    with torch.no_grad():
        before = first(IDS).logits
        for model in (first, second):
            model.model.rotary_emb.attention_scaling *= 2
        assert bits.equal(first(IDS).logits, second(IDS).logits)
        assert not bits.equal(first(IDS).logits, before)


def test_a_parameter_that_is_no_leaf_is_used_as_it_is(model):
    """torch.func.functional_call puts tensors in the place of parameters: they are computed with."""
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(model, weights, (IDS,)).logits
        for parameter in model.parameters():
            parameter.mul_(2)
        assert bits.equal(model(IDS).logits, found)


def test_modules_of_one_layer_may_trade_places_and_are_computed(model):
    layers = model.model.layers
    with torch.no_grad():
        before = model(IDS).logits
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
        assert not bits.equal(model(IDS).logits, before)
        assert isinstance(layers, nn.ModuleList)
