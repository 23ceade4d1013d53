"""A model class that isobit has never seen is enabled by registering its parts; a wrong formula raises."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import isobit
from isobit import bits, parts
from isobit.errors import ArgumentError, UnsupportedError


class TownConfig(PreTrainedConfig):
    model_type = "town"
    vocab_size: int = 64
    width: int = 64
    heads: int = 4
    depth: int = 2
    scale: float = 0.5
    use_cache: bool = True


class TownNorm(nn.Module):
    """RMSNorm whose weight is around zero, with an eps of another name."""

    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.randn(width))
        self.tiny = 1e-5

    def forward(self, x):
        power = x.float().square().mean(-1, keepdim=True)
        return (x * torch.rsqrt(power + self.tiny) * (1.0 + self.gamma)).to(x.dtype)


class TownGate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TownAttention(nn.Module):
    """Attention without a rotation: positions are learnt."""

    def __init__(self, config, place):
        super().__init__()
        self.config, self.place, self.is_causal = config, place, True
        self.head_dim = config.width // config.heads
        self.q, self.k, self.v, self.o = (nn.Linear(config.width, config.width) for _ in range(4))

    def forward(self, x, mask, cache, **inputs):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (
            self.q(x).view(shape).transpose(1, 2),
            self.k(x).view(shape).transpose(1, 2),
            self.v(x).view(shape).transpose(1, 2),
        )
        if cache is not None:
            k, v = cache.update(k, v, self.place)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        mixed, _ = attend(self, q, k, v, mask, scaling=self.head_dim**-0.5, dropout=0.0, **inputs)
        return self.o(mixed.reshape(*x.shape[:-1], -1))


class TownBlock(nn.Module):
    def __init__(self, config, place):
        super().__init__()
        self.before, self.between = TownNorm(config.width), TownNorm(config.width)
        self.attention, self.gate = TownAttention(config, place), TownGate(config.width)
        self.scale = config.scale

    def forward(self, x, mask, cache, **inputs):
        x = x + self.scale * self.attention(self.before(x), mask, cache, **inputs)
        return x + self.scale * self.gate(self.between(x))


class TownPreTrained(PreTrainedModel):
    config_class = TownConfig
    _supports_attention_backend = True
    _supports_sdpa = True


class TownModel(TownPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(128, config.width)
        self.blocks = nn.ModuleList(TownBlock(config, i) for i in range(config.depth))
        self.last = TownNorm(config.width)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **inputs,
    ):
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        x = x + self.places(position_ids)
        for block in self.blocks:
            x = block(x, mask, past_key_values, **inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.last(x), past_key_values=past_key_values
        )


class TownForCausalLM(TownPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.model = TownModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        **inputs,
    ):
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **inputs,
        )
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=64, **inputs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values
        )


RIGHT = {
    TownNorm: parts.rms_norm(eps="tiny", weight="gamma", offset=1.0),
    TownGate: parts.swiglu_mlp("w1", "w3", "w2"),
    TownForCausalLM: parts.head(),
}
IDS = torch.arange(20).reshape(2, 10) * 3 % 61 + 2


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TownForCausalLM(TownConfig()).eval()


@pytest.fixture
def registered():
    for kind, formula in RIGHT.items():
        parts.register(kind, formula)
    yield
    for kind in RIGHT:
        parts.unregister(kind)


def test_without_registration_the_first_unknown_part_is_named(model):
    try:
        for kind in RIGHT:
            said = rf"(?s)received: \S.*{kind.__name__}.*isobit\.parts\.register\({kind.__name__}"
            with pytest.raises(UnsupportedError, match=said):
                isobit.enable(model)
            parts.register(kind, RIGHT[kind])
        isobit.enable(model)
    finally:
        for kind in RIGHT:
            parts.unregister(kind)


def test_a_model_that_was_never_seen(model, registered):
    stock = model(IDS).logits.detach()
    theirs = torch.autograd.grad(model(IDS, labels=IDS).loss, list(model.parameters()))
    isobit.enable(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, stock, atol=1e-5, rtol=1e-5)
        alone = [isobit.logprobs(model, IDS[i : i + 1])[0] for i in range(2)]
        ids, mask = F.pad(IDS, (3, 0)), F.pad(torch.ones_like(IDS), (3, 0))
        together = isobit.logprobs(model, ids, mask)[:, 3:]
        assert all(bits.equal(a, b) for a, b in zip(alone, together, strict=True))
        cache = DynamicCache()
        pieces = [
            model(IDS[:, a:b], past_key_values=cache).logits for a, b in ((0, 4), (4, 5), (5, 10))
        ]
        assert bits.equal(torch.cat(pieces, 1), model(IDS).logits)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    for parameter, wanted in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-6, rtol=1e-4)


def test_it_is_copied_and_pickled(model, registered):
    isobit.enable(model)
    expected = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert bits.equal(twin(IDS).logits, expected)
    isobit.disable(model)
    assert "forward" not in vars(model.model.blocks[0].gate)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (TownNorm, parts.rms_norm(eps="tiny", weight="gamma")),
        (TownNorm, parts.rms_norm(eps=1e-2, weight="gamma", offset=1.0)),
        (TownNorm, parts.layer_norm(eps="tiny", weight="gamma", bias=None)),
        (TownNorm, parts.rms_norm(eps="tiny", weight=None)),
        (TownGate, parts.swiglu_mlp("w3", "w1", "w2")),
    ],
)
def test_a_wrong_formula_raises_with_the_largest_difference(model, registered, kind, formula):
    parts.register(kind, formula)
    with pytest.raises(UnsupportedError, match=rf"(?s){kind.__name__}.*by up to \d"):
        isobit.enable(model)
    assert "forward" not in vars(model.model.blocks[0].gate)
    stock = model(IDS).logits
    parts.register(kind, RIGHT[kind])
    isobit.enable(model)
    torch.testing.assert_close(model(IDS).logits, stock, atol=1e-5, rtol=1e-5)


def test_an_attribute_that_is_not_there(model, registered):
    parts.register(TownNorm, parts.rms_norm(eps="epsilon", weight="gamma", offset=1.0))
    with pytest.raises(UnsupportedError, match=r"(?s)TownNorm.*no attribute 'epsilon'"):
        isobit.enable(model)


def scaled_head(model):
    model.config.logits_scaling = 2.0
    return parts.head("divided")


def test_a_head_that_forgets_or_invents_a_scale_is_another_function(model, registered):
    """Equal in every batch, and another function: strict mode cannot see it, eight tokens do."""
    parts.register(TownForCausalLM, scaled_head(model))
    with pytest.raises(UnsupportedError, match=r"(?s)eight tokens.*another one: the largest"):
        isobit.enable(model)
    assert "forward" not in vars(model)


def own_gate(module, x):
    first, second = isobit.linear_group(x, [module.w1.weight, module.w3.weight])
    return module.w2(isobit.swiglu(first, second))


def wrong_gate(module, x):
    first, second = isobit.linear_group(x, [module.w1.weight, module.w3.weight])
    return module.w2(isobit.swiglu(second, first))


def test_a_function_of_the_user(model, registered):
    stock = model(IDS).logits.detach()
    parts.register(TownGate, wrong_gate)
    with pytest.raises(UnsupportedError, match="eight tokens"):
        isobit.enable(model)
    parts.register(TownGate, own_gate)
    isobit.enable(model)
    torch.testing.assert_close(model(IDS).logits, stock, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_registered():
    with pytest.raises(ArgumentError, match="a class of torch"):
        parts.register(TownConfig, parts.rms_norm())
    with pytest.raises(ArgumentError, match="a class of torch"):
        parts.register(TownNorm(4), parts.rms_norm())
    with pytest.raises(ArgumentError, match="a formula"):
        parts.register(TownNorm, 3)
    with pytest.raises(ArgumentError, match="a kind of head"):
        parts.head("softmax")
