"""An enabled model under `Gradients`: a loss that depends on the cut is refused, and copies stay tied."""

import copy
import pickle

import pytest
import torch

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.gates.model.models import build_model
from isobit.parallel import GlobalBatch, Gradients

IDS = torch.arange(96).reshape(8, 12) * 7 % 128
TARGETS = 8 * 11


@pytest.fixture
def model():
    model = build_model("qwen3-tiny", torch.float32).train()
    isobit.enable(model)
    return model


def read(model):
    return bits.digest({name: p.grad for name, p in model.named_parameters()})


def test_a_mean_over_a_share_is_refused(model):
    whole = copy.deepcopy(model)
    gradients = Gradients(model, GlobalBatch(total=8, micro_batches=2))
    with pytest.raises(UnsupportedError, match="num_items_in_batch"), gradients.micro_batch(0):
        model(IDS[:4], labels=IDS[:4], use_cache=False).loss.backward()
    for micro in range(2):
        rows = IDS[4 * micro : 4 * micro + 4]
        with gradients.micro_batch(micro):
            with torch.no_grad():
                model(rows, labels=rows)  # a metric
            model(rows, labels=rows, use_cache=False, num_items_in_batch=TARGETS).loss.backward()
    gradients.close()
    whole(IDS, labels=IDS, use_cache=False).loss.backward()
    assert read(model) == read(whole)


def test_one_share_that_is_the_whole_batch_may_have_a_mean(model):
    gradients = Gradients(model, GlobalBatch(total=8))
    with gradients.micro_batch(0):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    gradients.close()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model)))]
)
def test_copies_made_while_gradients_are_collected_are_tied(model, copied):
    whole = copy.deepcopy(model)
    gradients = Gradients(model, GlobalBatch(total=8, micro_batches=2))
    twin = copied(model)
    gradients.close()
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    for one in (whole, twin):
        one(IDS, labels=IDS, use_cache=False).loss.backward()
    assert read(twin) == read(whole)
