"""Strict mode accepts what is right on the first call: reentrant checkpoints, inference_mode; and still sees hooks."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.gates.model.models import build_model
from isobit.parallel import GlobalBatch, Gradients

IDS = torch.arange(96).reshape(8, 12) * 7 % 128
TARGETS = 8 * 11


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    model = copy.deepcopy(built).train()
    isobit.enable(model)
    return model


def train(model, rows=slice(0, 8)):
    model(IDS[rows], labels=IDS[rows], use_cache=False, num_items_in_batch=TARGETS).loss.backward()


def read(model):
    return bits.digest({name: p.grad for name, p in model.named_parameters()})


def recompute(model, use_reentrant):
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_the_first_call_give_the_gradient(model, use_reentrant):
    plain = copy.deepcopy(model)
    train(plain)
    recompute(model, use_reentrant)
    train(model)
    assert read(model) == read(plain)
    model.zero_grad()
    gradients = Gradients(model, GlobalBatch(total=8, micro_batches=4))
    for micro in range(4):
        with gradients.micro_batch(micro):
            train(model, slice(2 * micro, 2 * micro + 2))
    gradients.close()
    assert read(model) == read(plain)


def add_bias(bias):
    """A hook whose gradient is a sum over the batch: no operator of its forward pass says so without gradients."""
    return lambda module, given, output: output + bias


def test_hooks_that_a_reentrant_checkpoint_hides_are_refused(model):
    bias = torch.zeros(64, requires_grad=True)
    hook = model.model.layers[1].mlp.register_forward_hook(add_bias(bias))
    recompute(model, True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"(?s)CheckpointFunction.*use_reentrant.*False"):
            train(model)
    recompute(model, False)  # shows the hook's addition
    with pytest.raises(UnsupportedError, match="broadcast"):
        train(model)
    hook.remove()
    recompute(model, True)
    train(model)


def test_a_checkpoint_of_something_else_than_a_layer_is_refused(model):
    bias = torch.zeros(64, requires_grad=True)

    def hide(module, given, output):
        return checkpoint(lambda hidden: hidden + bias, output, use_reentrant=True)

    model.model.norm.register_forward_hook(hide)
    with pytest.raises(UnsupportedError, match="CheckpointFunction"):
        train(model)


def test_inference_mode_first(model):
    with torch.inference_mode():
        found = model(IDS).logits
        scored = isobit.logprobs(model, IDS)
        model.eval().generate(IDS[:, :4], max_new_tokens=2, do_sample=False)
    model.train()
    with torch.no_grad():
        assert bits.equal(found, model(IDS).logits)
        assert bits.equal(scored, isobit.logprobs(model, IDS))


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("addmm|mm", lambda y: y @ y.new_ones(64, 64)),
        ("addmm|mm", lambda y: torch.nn.functional.linear(y, y.new_ones(64, 64))),
        ("_softmax", lambda y: y.softmax(-1)),
        ("layer_norm", lambda y: torch.nn.functional.layer_norm(y, (64,))),
        ("dot_product|bmm", lambda y: torch.nn.functional.scaled_dot_product_attention(y, y, y)),
    ],
)
def test_stock_operators_are_seen_under_inference_mode(model, name, stock):
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: stock(output))
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=f"(?s){name}"):
        model(IDS)
