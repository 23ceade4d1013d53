"""`isobit.freeze` of an enabled model: the bits of a model that is not frozen, in every kind of call."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.gates.model.models import build_model
from isobit.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
IDS = torch.randint(0, 128, (3, 9), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    made = build_model("qwen3-tiny", request.param)
    with isobit.enabled(made):
        for parameter in made.parameters():
            parameter.data = parameter.data.clone()
        yield made


def test_bits_are_those_of_the_model_that_is_not_frozen(model):
    expected, grads = logits(model), gradients(model)
    tokens = model.generate(IDS[:1], max_new_tokens=4, do_sample=False)
    with isobit.freeze(model) as frozen:
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        assert len(layers) == 15
        assert frozen.nbytes >= sum(layer.weight.nbytes for layer in layers)
        assert bits.equal(logits(model), expected)
        assert all(map(bits.equal, gradients(model), grads))
        assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, do_sample=False), tokens)
        with torch.autocast("cpu", torch.bfloat16):
            cast = logits(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert bits.equal(cast, logits(model))
    assert bits.equal(logits(model), expected)


def test_weights_in_a_file_are_refused_by_name_with_a_remedy_that_works():
    model = isobit.enable(build_model("qwen3-tiny", torch.float32))
    with pytest.raises(isobit.ArgumentError, match=r"(?s)q_proj: .*mapped.*data\.clone\(\)"):
        isobit.freeze(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    isobit.freeze(model).thaw()


def test_packed_weights_are_read_and_a_write_is_seen(model):
    layer = model.model.layers[0].self_attn.q_proj
    # It is read where that is faster: with AMX for more than 64 rows of bf16, else for up to 32.
    ids = IDS.repeat(3, 1) if dispatch.engine_of(layer.weight.dtype) == "amx" else IDS
    with isobit.freeze(model):
        before = logits(model, ids)
        packed = layer.__dict__["_isobit_packed"]
        packed._snapshot.packed.zero_()  # a planted wrong form, which must be read
        assert not bits.equal(logits(model, ids), before)
        with torch.no_grad():
            layer.weight.mul_(1.5)
        after = logits(model, ids)
        assert packed.repacks == 1
    assert bits.equal(logits(model, ids), after)
    assert not bits.equal(after, before)


def test_the_last_thaw_drops_the_forms(model):
    outer = isobit.freeze(model)
    with isobit.freeze(model):
        pass
    layer = model.model.layers[0].mlp.down_proj
    assert "_isobit_packed" in layer.__dict__
    outer.thaw()
    outer.thaw()
    assert not [key for key in layer.__dict__ if key.startswith(("_isobit_packed", "_isobit_free"))]


def test_training_does_not_pack_forms_that_it_does_not_read(model):
    layers = model.model.layers[0]
    with isobit.freeze(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        gradients(model)
        forms = [
            m.__dict__["_isobit_packed"] for m in (layers.self_attn.q_proj, layers.mlp.up_proj)
        ]
        assert [form.repacks for form in forms] == [0, 0]
        logits(model)
        assert [form.repacks for form in forms] == [1, 1]


def test_a_tied_embedding_is_watched_and_sees_writes():
    made = build_model("qwen3-tiny", torch.float32)
    for parameter in made.parameters():
        parameter.data = parameter.data.clone()
    made.lm_head.weight = made.model.embed_tokens.weight
    with isobit.enabled(made):
        with isobit.freeze(made):
            assert "_isobit_packed" in made.model.embed_tokens.__dict__
            with torch.no_grad():
                made.lm_head.weight.mul_(1.5)
            frozen = logits(made)
        assert "_isobit_packed" not in made.model.embed_tokens.__dict__
        assert bits.equal(logits(made), frozen)
