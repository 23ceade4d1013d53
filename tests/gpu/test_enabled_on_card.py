"""A whole model on a GPU runs isobit's operators on the GPU, with the bits that the model has on the CPU.

The GPU is the stand-in of stand_in_card.py: tensors that say `cuda`. It shows where a tensor is made on the wrong
device, where a stock operator would add, and what is read on the host. It says nothing about kernels.
"""

import pytest
import torch
from stand_in_card import Card, host_reads, on_card, operators, to_card
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import isobit
from isobit import bits
from isobit.errors import ArgumentError, EngineError, UnsupportedError
from isobit.ops.gpu import attestation

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False)),
    "llama, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**SIZES, **HEADS, **EXPERTS, **LINEAR_ATTENTION)
    ),
}
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
RESTARTS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7]])


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.fixture(params=MODELS)
def pair(request):
    """Return the same model on the CPU and on the card, both enabled, with the card open."""
    with on_card():
        yield isobit.enable(make(request.param)), isobit.enable(to_card(make(request.param)))


@pytest.fixture
def model():
    """Return an enabled model on the card, with the card open."""
    with on_card():
        yield isobit.enable(to_card(make("qwen3")))


def place_of(model):
    return "cuda" if isinstance(next(model.parameters()), Card) else "cpu"


def score(model, ids=IDS, **inputs):
    moved = {name: value.to(place_of(model)) for name, value in inputs.items()}
    return isobit.logprobs(model, ids.to(place_of(model)), **moved)


def gradients(model):
    return {name: p.grad.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["plain", "padded", "packed"])
def test_log_probabilities_and_gradients_have_the_bits_of_the_cpu(pair, layout):
    inputs = {
        "plain": {},
        "padded": {"attention_mask": MASK},
        "packed": {"ids": IDS.view(1, -1), "position_ids": RESTARTS},
    }[layout]
    found = []
    for model in pair:
        scores = score(model, **inputs)
        scores.backward(torch.ones_like(scores))
        found.append((scores.detach().cpu(), gradients(model)))
    (expected, wanted), (scores, grads) = found
    assert bits.equal(scores, expected)
    assert [name for name in wanted if not bits.equal(grads[name], wanted[name])] == []
    assert grads
    ours = {name for name in operators if name.startswith("isobit::")}
    assert {"isobit::triton_linear_logprob_backward", "isobit::triton_attention"} <= ours
    assert all(name.startswith("isobit::triton_") for name in ours)


def test_logits_and_the_loss_with_gradients(pair):
    found = []
    for model in pair:
        ids = IDS.to(place_of(model))
        logits = model(ids).logits
        logits.backward(torch.ones_like(logits))
        first = gradients(model)
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append([logits.detach().cpu(), loss.detach().cpu(), first, gradients(model)])
    expected, received = found
    assert bits.equal(received[0], expected[0])
    assert bits.equal(received[1], expected[1])
    for kind in (2, 3):
        wrong = [n for n, g in expected[kind].items() if not bits.equal(received[kind][n], g)]
        assert wrong == []


@pytest.mark.parametrize("sampled", [False, True])
def test_generate_with_its_cache(pair, sampled):
    rolled = []
    for model in pair:
        mask = MASK.to(place_of(model))
        how = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "attention_mask": mask}
        drawing = [isobit.KeyedSampling(7, **how)] if sampled else []
        told = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        ids = IDS.to(place_of(model))
        rolled.append(
            model.generate(ids, attention_mask=mask, logits_processor=drawing, **told).cpu()
        )
    assert torch.equal(*rolled)
    assert rolled[0].shape == (3, 8)


def test_what_is_read_on_the_host(model):
    """The mask, the largest position and the spans of samples; no floating-point value."""
    score(model)  # makes the tables of the rotary embedding, which are computed on the CPU
    host_reads.clear()
    scores = score(model)
    assert set(host_reads) <= {"aten::_local_scalar_dense", "aten::equal"}, host_reads
    assert "to cpu" not in host_reads
    host_reads.clear()
    scores.backward(torch.ones_like(scores))
    assert set(host_reads) <= {"aten::equal", "tolist", "aten::_local_scalar_dense"}, host_reads


def test_strict_mode_names_a_stock_operator_on_the_card(model):
    layer = model.model.layers[0]
    with torch.no_grad():
        score(model)
        hook = layer.register_forward_hook(lambda *given: given[-1] + given[-1].sum())
        with pytest.raises(UnsupportedError, match=r"aten::sum in model\.layers\.0"):
            score(model)
        hook.remove()
        score(model)


def test_a_card_is_watched_anew_after_the_cpu():
    """A kind of call that was watched on the CPU says nothing about the card, or about a backend."""
    config = Qwen3Config(**{**SIZES, "num_hidden_layers": 1}, **HEADS)
    model = isobit.enable(Qwen3ForCausalLM(config))
    state = model.__dict__["_isobit_state"].strictness
    with torch.no_grad():
        score(model)
        first = set(state.watched)
        with isobit.certifying.executing("interpreter", target="sm_90"):
            score(model, IDS[:1, :1])
        assert len(first) == 1
        assert len(state.watched) == 2


def test_a_mask_elsewhere_is_refused(model):
    with pytest.raises(ArgumentError, match="attention_mask on cpu"):
        isobit.logprobs(model, IDS.to("cuda"), MASK)


@pytest.mark.usefixtures("model")
def test_the_paged_cache():
    torch.manual_seed(0)
    q, k, v = (torch.randn(70, heads, 16) for heads in (4, 2, 2))
    found = []
    for device in ("cpu", "cuda"):
        cache = isobit.KVCache(2, 16, pages=1, device=device)
        one = cache.start()
        cache.append(one, k[:66].to(device), v[:66].to(device))
        other = cache.fork(one)
        cache.append(one, k[66:].to(device), v[66:].to(device))
        queries = q[[69, 65]].to(device)
        found.append(cache.attend(queries, [one, other]).cpu())
    assert bits.equal(*found)
    with pytest.raises(ArgumentError, match="one device"):
        cache.append(one, k[:1], v[:1])


def test_nothing_is_attested_while_a_graph_is_captured(monkeypatch, model):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(attestation, "_found", {})
    x = torch.randn(2, 16).to("cuda")
    with pytest.raises(EngineError, match=r"silu in torch\.float32 to be attested") as refused:
        isobit.silu(x)
    assert "isobit doctor" in str(refused.value)
    assert attestation._found == {}
    with pytest.raises(UnsupportedError, match="CUDA graph"):
        score(model)


@pytest.mark.usefixtures("model")
def test_weights_on_a_card_are_not_frozen():
    layer = isobit.nn.Linear(32, 16)
    layer.weight = torch.nn.Parameter(Card(layer.weight.detach()))
    with pytest.raises(EngineError, match="a weight on the CPU"):
        isobit.freeze(layer)


def test_the_stand_in_refuses_what_a_card_refuses():
    """Tensors of two devices, kernels of the CPU, and NumPy."""
    with on_card():
        x = torch.randn(2, 16).to("cuda")
        assert x.is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2, 16)
        with pytest.raises(NotImplementedError, match="no kernel for cuda"):
            torch.ops.isobit.silu(x)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


def test_sampling_does_not_change_the_logits_it_is_given():
    scores = torch.randn(2, 40)
    before = scores.clone()
    isobit.KeyedSampling(7, 0.5, attention_mask=None)(IDS[:2], scores)
    assert bits.equal(scores, before)


def test_a_loss_is_divided_by_a_tensor_on_its_device():
    """By a number, a GPU would multiply by the reciprocal, and the last bit would differ from the CPU's."""
    hidden, weight = torch.randn(6, 16), torch.randn(40, 16)
    targets = torch.randint(0, 40, (6,))
    with on_card():
        moved = [t.to("cuda") for t in (hidden, weight, targets)]
        operators.clear()
        found = isobit.linear_cross_entropy(*moved)
        assert operators["aten::div"] == 1
        assert operators["aten::full"] == 0  # made on the card, not by an operator of a card tensor
    expected = isobit.linear_cross_entropy(hidden, weight, targets)
    assert bits.equal(found.cpu(), expected)
    by_number = isobit.exact_sum(isobit.linear_logprob(hidden, weight, targets)) / -6
    assert bits.equal(expected, by_number)
