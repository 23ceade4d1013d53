"""An enabled model has stock's parameters and names, and can be put back at any time."""

import copy
import pickle
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import isobit
from isobit import bits
from isobit.errors import ArgumentError, UnsupportedError
from isobit.gates.model.models import TINY, build_model
from isobit.integrations.transformers.state import find_state

IDS = torch.arange(24).reshape(2, 12) % 128
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0


@pytest.fixture(scope="module")
def built():
    return build_model("qwen3-tiny", torch.float32)


@pytest.fixture
def model(built):
    return copy.deepcopy(built)


def gradients(model):
    model.zero_grad(set_to_none=True)
    model.train()
    # On the right: without position_ids, stock counts left padding as positions
    mask = MASK.flip(1)
    model(
        IDS, attention_mask=mask, labels=IDS.masked_fill(mask == 0, -100), use_cache=False
    ).loss.backward()
    model.eval()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen2-tiny", "llama-tiny"])
def test_values_are_stock_s_to_rounding(name):
    model = build_model(name, torch.float32)
    stock = model(IDS).logits.detach()
    stock_gradients = gradients(model)
    with isobit.enabled(model):
        torch.testing.assert_close(model(IDS).logits, stock, atol=1e-5, rtol=1e-5)
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, stock_gradients[name], atol=1e-5, rtol=1e-3)


def test_strict_mode_accepts_the_portable_executor(model):
    """fp64 has no native kernels: every sum is a portable operator's."""
    model.double()
    with isobit.enabled(model):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
    assert loss.dtype == torch.float64
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_names_and_state_dict_stay(model, tmp_path):
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    digest, kind = bits.digest(model), type(model)
    with isobit.enabled(model):
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
        assert bits.digest(model) == digest
        assert type(model) is kind
        model.save_pretrained(tmp_path)
    assert "isobit" not in (tmp_path / "config.json").read_text()
    assert bits.digest(kind.from_pretrained(tmp_path)) == digest


def test_disable_gives_stock_back(model):
    stock, chosen = model(IDS).logits, model.config._attn_implementation
    assert isobit.enable(model) is model
    isobit.enable(model)
    model(IDS)
    assert isobit.disable(model) is model
    isobit.disable(model)
    assert bits.equal(model(IDS).logits, stock)
    assert model.config._attn_implementation == chosen
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_block_leaves_an_enabled_model_enabled(model):
    with isobit.enabled(isobit.enable(model)):
        pass
    assert find_state(model) is not None
    isobit.disable(model)
    assert find_state(model) is None


def test_disable_inside_a_block_is_refused_and_changes_nothing(model):
    with isobit.enabled(model) as same:
        assert same is model
        inside = model(IDS).logits
        with pytest.raises(UnsupportedError, match="leave the block"):
            isobit.disable(model)
        assert bits.equal(model(IDS).logits, inside)
        copied = copy.deepcopy(model)
    assert find_state(model) is None
    assert bits.equal(copied(IDS).logits, inside)
    assert find_state(isobit.disable(copied)) is None


def test_nested_use_counts(model):
    with isobit.enabled(model):
        with isobit.enabled(model):
            inner = model(IDS).logits
        assert bits.equal(model(IDS).logits, inner)
        assert find_state(model) is not None
    assert find_state(model) is None


def test_an_exception_inside_puts_stock_back(model):
    stock = model(IDS).logits
    with pytest.raises(KeyError), isobit.enabled(model):
        raise KeyError
    assert bits.equal(model(IDS).logits, stock)


def test_a_forward_that_raises_leaves_the_model_usable(model):
    with isobit.enabled(model):
        expected = model(IDS).logits
        with pytest.raises(ArgumentError):
            model(IDS, attention_mask=torch.ones(2, 1, 12, 12))
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            model(IDS + 1_000_000)
        assert bits.equal(model(IDS).logits, expected)


def test_an_earlier_forward_of_an_instance_is_refused(model):
    layer = model.model.layers[0].mlp

    def doubled(x):
        return 2 * type(layer).forward(layer, x)

    layer.forward = doubled  # isobit would compute the layer without it
    with pytest.raises(UnsupportedError, match=r"(?s)layers\.0\.mlp.*before a trainer"):
        isobit.enable(model)
    assert layer.forward is doubled
    assert find_state(model) is None


def test_copies_and_pickles_are_enabled_and_independent(model):
    with isobit.enabled(model):
        expected = model(IDS).logits
        twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (twin, thawed):
        assert bits.equal(other(IDS).logits, expected)
        assert other.model.layers[0].mlp.forward.args[0] is other.model.layers[0].mlp


def test_gradient_checkpointing_has_the_same_bits(model):
    with isobit.enabled(model):
        plain = gradients(model)
        model.gradient_checkpointing_enable()
        again = gradients(model)
    assert all(bits.equal(plain[name], again[name]) for name in plain)


def test_logits_and_logprobs_are_one(model):
    with isobit.enabled(model), torch.no_grad():
        selected = isobit.logprobs(model, IDS, MASK)
        logits = model(IDS, attention_mask=MASK).logits
        last = model(IDS, attention_mask=MASK, logits_to_keep=1).logits
    assert logits.dtype == selected.dtype == torch.float32
    by_logits = isobit.log_softmax(logits)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    held = MASK[:, :-1].bool()
    assert bits.equal(by_logits[held], selected[:, :-1][held])
    assert bits.equal(last[:, 0], logits[:, -1])


def test_the_head_s_gradient_by_logits(model):
    with isobit.enabled(model):
        logits = model(IDS, attention_mask=MASK).logits
        (
            isobit.log_softmax(logits)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0] * MASK[:, :-1]
        ).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_labels_need_no_logits_and_count_is_honoured(model):
    with isobit.enabled(model), torch.no_grad():
        found = model(IDS, labels=IDS)
        assert found.logits is None
        summed = model(IDS, labels=IDS, num_items_in_batch=torch.tensor(11)).loss
        shifted = torch.cat((IDS[:, 1:], torch.full((2, 1), -100)), dim=1)
        assert bits.equal(model(IDS, labels=IDS, shift_labels=shifted).loss, found.loss)
        assert model(IDS, labels=IDS, return_dict=False)[0] == found.loss
    torch.testing.assert_close(summed, found.loss * 2)


def test_generate_equals_a_score_afterwards(model):
    with isobit.enabled(model), torch.no_grad():
        made = model.generate(
            IDS,
            attention_mask=MASK,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        rolled = isobit.log_softmax(torch.stack(made.logits, 1)).gather(
            -1, made.sequences[:, -5:, None]
        )[..., 0]
        mask = torch.cat((MASK, torch.ones(2, 5, dtype=torch.int64)), dim=1)
        scored = isobit.logprobs(model, made.sequences, mask)[:, -6:-1]
        alone = model.generate(IDS[:1, 3:], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert bits.equal(rolled, scored)
    assert alone[0, -5:].tolist() == made.sequences[0, -5:].tolist()


def test_threads_have_their_own_layouts(model):
    found = {}
    with isobit.enabled(model), torch.no_grad():
        expected = {
            width: isobit.logprobs(model, IDS[:, :width], MASK[:, :width]) for width in (6, 12)
        }

        def run(width):
            found[width] = [
                isobit.logprobs(model, IDS[:, :width], MASK[:, :width]) for _ in range(4)
            ]

        running = [threading.Thread(target=run, args=(width,)) for width in expected]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    assert all(
        bits.equal(value, expected[width]) for width, values in found.items() for value in values
    )


def test_a_sliding_window_is_honoured():
    sizes = {
        **TINY,
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    assert "sliding_attention" in model.config.layer_types
    stock = model(IDS).logits
    with isobit.enabled(model), torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        torch.testing.assert_close(whole, stock, atol=1e-5, rtol=1e-5)
        cache = DynamicCache()
        parts = [model(IDS[:, at : at + 4], past_key_values=cache).logits for at in (0, 4, 8)]
        assert bits.equal(torch.cat(parts, dim=1), whole)
        # Its empty layers that would drop keys are replaced by ones that keep them.
        given = DynamicCache(config=model.config)
        parts = [model(IDS[:, at : at + 4], past_key_values=given).logits for at in (0, 4, 8)]
        assert bits.equal(torch.cat(parts, dim=1), whole)
    cropped = DynamicCache(config=model.config)
    model(IDS[:, :4], past_key_values=cropped)
    with isobit.enabled(model), pytest.raises(UnsupportedError, match="keeps every key"):
        model(IDS[:, 4:8], past_key_values=cropped)


def test_refusals(model):
    with pytest.raises(UnsupportedError, match=r"(?s)a causal language model.*Linear"):
        isobit.enable(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="enable"):
        isobit.logprobs(model, IDS)
    with isobit.enabled(model):
        with pytest.raises(UnsupportedError, match="DynamicCache"):
            model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=32))
        with pytest.raises(UnsupportedError, match="own row"):
            model(IDS[:1], position_ids=torch.tensor([[0, 1, 2, 3] * 3]), use_cache=True)
        model.config._attn_implementation = "sdpa"
        with pytest.raises(UnsupportedError, match="attention implementation"):
            model(IDS)
        model.config._attn_implementation = "isobit"


def test_dropout_is_refused_in_training(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with isobit.enabled(model):
        model(IDS)
        with pytest.raises(UnsupportedError, match="dropout"):
            model.train()(IDS)


def test_rotary_that_follows_the_batch_is_refused():
    rotary = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="longest sequence"):
        isobit.enable(LlamaForCausalLM(LlamaConfig(**TINY, head_dim=64, rope_parameters=rotary)))


def test_a_wrapped_layer_is_refused(model):
    class Adapter(torch.nn.Linear):
        pass

    model.model.layers[0].self_attn.q_proj.__class__ = Adapter
    with pytest.raises(UnsupportedError, match=r"(?s)q_proj of type test_enable\..*Adapter"):
        isobit.enable(model)
    assert find_state(model) is None


def test_the_bare_model(model):
    with isobit.enabled(model.model), torch.no_grad():
        together = model.model(IDS, attention_mask=MASK).last_hidden_state
        alone = model.model(IDS[:1, 3:]).last_hidden_state
    assert bits.equal(together[:1, 3:], alone)


def test_coverage_lists_what_ran(model):
    gradients(model)
    held = [p.grad for p in model.parameters()]
    batch = {"input_ids": IDS, "attention_mask": MASK}
    stock = isobit.coverage_report(model, batch)
    with isobit.enabled(model):
        ours = isobit.coverage_report(model, batch)
    assert not stock.kept
    assert ours.kept
    assert any(use.operator.startswith("isobit::") for use in ours.operators)
    assert all(p.grad is was for p, was in zip(model.parameters(), held, strict=True))


def test_torch_compile_runs_it_eagerly(model):
    with isobit.enabled(model), torch.no_grad():
        expected = model(IDS).logits
        assert bits.equal(torch.compile(model)(IDS).logits, expected)


def test_another_loss_is_refused_by_name_and_the_remedies_work(model):
    stock = model.loss_function

    def my_loss(logits, labels, vocab_size, **_):
        return logits.sum() * 0 + 42.0

    with isobit.enabled(model):
        expected = model(IDS, labels=IDS).loss
        model.loss_function = my_loss
        with pytest.raises(
            UnsupportedError, match=r"(?s)loss_function = .*my_loss.*without labels"
        ):
            model(IDS, labels=IDS)
        assert my_loss(model(IDS).logits, IDS, 128).item() == 42.0
        model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
        assert bits.equal(model(IDS, labels=IDS).loss, expected)
        model.loss_function = stock
        assert bits.equal(model(IDS, labels=IDS).loss, expected)
        model.loss_type = "ForMaskedLM"
        del model._loss_function
        with pytest.raises(UnsupportedError, match="ForMaskedLMLoss"):
            model(IDS, labels=IDS)


@pytest.mark.parametrize("shape", [(0, 9), (2, 0), (9,)])
def test_an_empty_batch_is_refused_with_its_shape(model, shape):
    with isobit.enabled(model), pytest.raises(ArgumentError, match=r"(?s)input_ids.*at least one"):
        model(torch.zeros(shape, dtype=torch.long))


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("GraniteMoe", r"block_sparse_moe.* of type .*GraniteMoe"),
        ("Cohere", r"apply_rotary_pos_emb.*CohereAttention"),
        ("Apertus", r"act_fn of type .*XIELUActivation"),
        ("GPTNeoX", "GPTNeoXForCausalLM"),
    ],
)
def test_a_model_with_an_unknown_part_names_the_part_and_where_to_go(name, missing):
    config = getattr(transformers, f"{name}Config")(**SMALL)
    other = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(UnsupportedError, match=rf"(?s){missing}.*own-model\.md"):
        isobit.enable(other)


def test_another_head_names_the_backbone_which_can_be_enabled():
    class Classifier(transformers.Qwen3ForSequenceClassification):
        def forward(self, input_ids):
            return self.score(self.model(input_ids).last_hidden_state)

    config = transformers.Qwen3Config(**SMALL, num_labels=3)
    torch.manual_seed(0)
    classifier = Classifier(config).eval()
    with pytest.raises(UnsupportedError, match=r"(?s)a head.*isobit\.enable\(model\.model\)"):
        isobit.enable(classifier)
    isobit.enable(classifier.model)
    classifier.score = isobit.nn.Linear.sharing(classifier.score)
    ids = IDS % 64
    with torch.no_grad():
        assert bits.equal(classifier(ids)[:1], classifier(ids[:1]))
