"""An enabled model computes every module it has: what is put into it later runs, or is refused at every call."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.gates.model.models import build_model

IDS = torch.arange(24).reshape(2, 12) % 128
AGAIN = r"isobit\.enable\(model\) again"


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    return copy.deepcopy(built)


class Lora(nn.Module):
    """As adapters are: they have the weight of what they wrap."""

    def __init__(self, base):
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class Quantised(torch.Tensor):
    pass


def place(path, make):
    """Puts what `make` makes of a module in its place."""

    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return change


def act(path, what):
    return lambda model: what(model.get_submodule(path))


def plain_weight(layer):
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight


def subclass_weight(layer):
    layer._parameters["weight"] = layer.weight.detach().as_subclass(Quantised)


def double_forward(module):
    earlier = module.forward
    module.forward = lambda *given, **named: 2 * earlier(*given, **named)


def limit_norm(embedding):
    embedding.max_norm = 1.0


def stock_linear(layer):
    return nn.Linear(layer.in_features, layer.out_features, bias=False)


def replaced_container(layer):
    """A dictionary of hooks of its own, which nothing that was kept refers to."""
    layer._forward_hooks = type(layer._forward_hooks)({0: lambda *_: None})


FIRST = "model.layers.0"
Q, O = f"{FIRST}.self_attn.q_proj", f"{FIRST}.self_attn.o_proj"
ACT = f"{FIRST}.mlp.act_fn"
GATE, DOWN = f"{FIRST}.mlp.gate_proj", f"{FIRST}.mlp.down_proj"
NOTHING = lambda *_: None  # noqa: E731
# What is done to an enabled model, and what the refusal says.
CHANGES = {
    "LoRA on q": (place(Q, Lora), r"adapter.*q_proj.*merge_and_unload"),
    "LoRA on gate": (place(GATE, Lora), r"adapter.*gate_proj.*merge_and_unload"),
    "LoRA on down": (place(DOWN, Lora), r"adapter.*down_proj.*merge_and_unload"),
    "another q": (place(Q, stock_linear), f"q_proj.*{AGAIN}"),
    "another o": (place(O, stock_linear), f"o_proj.*{AGAIN}"),
    "another head": (place("lm_head", stock_linear), f"lm_head.*{AGAIN}"),
    "a stock layer": (
        place(FIRST, lambda layer: type(layer)(layer.self_attn.config, 0)),
        rf"layers\.0.*{AGAIN}",
    ),
    "another activation": (
        place(f"{FIRST}.mlp.act_fn", lambda _: nn.GELU()),
        rf"layers\.0\.mlp.*{AGAIN}",
    ),
    "a forward taken off": (
        act(DOWN, lambda layer: layer.__dict__.pop("forward")),
        f"down_proj.*{AGAIN}",
    ),
    "a forward wrapped": (act(DOWN, double_forward), f"down_proj.*{AGAIN}"),
    "a forward of a layer wrapped": (act(FIRST, double_forward), rf"layers\.0.*{AGAIN}"),
    "a parametrization of q": (
        act(Q, nn.utils.parametrizations.weight_norm),
        "parametrization.*q_proj",
    ),
    "a parametrization of o": (
        act(O, nn.utils.parametrizations.weight_norm),
        "parametrization.*o_proj",
    ),
    "a hook on the activation": (
        act(f"{FIRST}.mlp.act_fn", lambda m: m.register_forward_hook(NOTHING)),
        "act_fn",
    ),
    "other hooks of the activation": (
        act(f"{FIRST}.mlp.act_fn", replaced_container),
        "no hook on .*act_fn",
    ),
    "a weight that is no parameter": (act(Q, plain_weight), "q_proj.weight as a parameter"),
    "a subclass of tensors": (act(Q, subclass_weight), "q_proj.weight as a plain.*Quantised"),
    "a bias of q alone": (
        act(Q, lambda m: setattr(m, "bias", nn.Parameter(torch.ones(256)))),
        "a bias on all",
    ),
    "a bias of the head": (
        act("lm_head", lambda m: setattr(m, "bias", nn.Parameter(torch.ones(128)))),
        "head without",
    ),
    "an embedding of bounded norm": (act("model.embed_tokens", limit_norm), "plain embedding"),
    "a layer compiled by itself": (act(FIRST, lambda m: m.compile(backend="eager")), "run eagerly"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_what_would_not_be_computed_is_refused_at_every_call(model, name, strict):
    change, said = CHANGES[name]
    isobit.enable(model, strict=strict)
    with torch.no_grad():
        isobit.logprobs(model, IDS)
        model(IDS)
        change(model)
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=f"(?s){said}"):
                model(IDS)
            with pytest.raises(UnsupportedError, match=f"(?s){said}"):
                isobit.logprobs(model, IDS)


def test_a_patched_class_is_refused(model, monkeypatch):
    isobit.enable(model)
    kind = type(model.model.layers[0].mlp)
    expected = model(IDS).logits
    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", lambda self, x: x)
        with pytest.raises(UnsupportedError, match=r"MLP\.forward as transformers"):
            model(IDS)
    assert bits.equal(model(IDS).logits, expected)


def test_a_class_in_the_place_of_another_is_refused(monkeypatch):
    """As `apply_liger_kernel_to_llama()` does before a model is made: its norm would be computed as Llama's."""
    home = importlib.import_module("transformers.models.llama.modeling_llama")

    class Doubled(home.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    monkeypatch.setattr(home, "LlamaRMSNorm", Doubled)
    patched = build_model("llama-tiny", torch.float32)
    with pytest.raises(UnsupportedError, match=r"(?s)input_layernorm of type \S*Doubled"):
        isobit.enable(patched)
    monkeypatch.undo()
    isobit.enable(build_model("llama-tiny", torch.float32))


def test_another_attention_under_our_name_is_refused(model):
    isobit.enable(model)
    expected = model(IDS).logits
    ours = ALL_ATTENTION_FUNCTIONS["isobit"]
    AttentionInterface.register("isobit", ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        for _ in range(2):
            with pytest.raises(
                UnsupportedError, match=r"(?s)registry\n  received: transformers\..*sdpa"
            ):
                model(IDS)
    finally:
        AttentionInterface.register("isobit", ours)
    assert bits.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("name", ["a hook on the activation", "LoRA on down", "a bias of the head"])
def test_enable_refuses_the_same(model, name):
    change, said = CHANGES[name]
    change(model)
    with pytest.raises(UnsupportedError, match=f"(?s){said}"):
        isobit.enable(model)


def test_what_is_undone_runs_again(model):
    isobit.enable(model)
    expected = model(IDS).logits
    hook = model.get_submodule(ACT).register_forward_hook(NOTHING)
    with pytest.raises(UnsupportedError):
        model(IDS)
    hook.remove()
    assert bits.equal(model(IDS).logits, expected)


def test_more_words_are_computed_where_the_head_stays(model):
    with isobit.enabled(model):
        model(IDS)
        model.resize_token_embeddings(140)  # tied: the modules stay, their weight is another
        found = model(IDS).logits.detach()
    torch.testing.assert_close(model(IDS).logits, found, atol=1e-5, rtol=1e-5)


def test_the_remedy_of_a_head_that_more_words_replaced():
    model = build_model("llama-tiny", torch.float32)
    isobit.enable(model)
    model(IDS)
    model.resize_token_embeddings(140)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=AGAIN):
            model(IDS)
    isobit.disable(model)
    stock = model(IDS).logits.detach()
    isobit.enable(model)
    torch.testing.assert_close(model(IDS).logits, stock, atol=1e-5, rtol=1e-5)


def test_a_pickled_model_runs_where_nothing_was_enabled_before(model):
    """As in another process: transformers' registries do not have isobit's attention there."""
    isobit.enable(model)
    expected, data = model(IDS).logits, pickle.dumps(model)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop("isobit")
    assert bits.equal(pickle.loads(data)(IDS).logits, expected)


def test_copies_check_their_own_modules(model):
    isobit.enable(model)
    expected = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert bits.equal(twin(IDS).logits, expected)
        twin.get_submodule(ACT).register_forward_hook(NOTHING)
        with pytest.raises(UnsupportedError, match="no hook"):
            twin(IDS)
    assert bits.equal(model(IDS).logits, expected)
