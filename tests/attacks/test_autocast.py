"""Under torch.autocast an enabled model computes as stock does there, and with one order: no layout changes a bit."""

import copy

import pytest
import torch

import isobit
from isobit import bits
from isobit.errors import UnsupportedError
from isobit.gates.model import batch_layouts
from isobit.gates.model.batch_layout_gate import run_gate
from isobit.gates.model.batch_layouts import IsobitScorer
from isobit.gates.model.models import build_model
from isobit.parallel import GlobalBatch, Gradients

IDS = torch.arange(24).reshape(2, 12) % 128


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3-tiny", torch.bfloat16), ("llama-tiny", torch.bfloat16), ("qwen3-tiny", torch.float16)],
    ids=str,
)
def test_every_layout_gives_the_same_bits(name, dtype):
    model = build_model(name, torch.float32)
    samples = batch_layouts.draw_samples(model.config.vocab_size)
    with isobit.enabled(model), torch.autocast("cpu", dtype):
        report = run_gate(IsobitScorer(model), samples)
    assert [row for row in report.rows if not row.kept] == []
    assert report.trained == report.parameters


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen2-tiny"])
def test_values_are_stock_s_to_rounding(name, weights):
    model = build_model(name, weights)

    def run():
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(IDS).logits.float().detach()
            loss = model(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        return logits, loss.detach(), {name: p.grad.float() for name, p in model.named_parameters()}

    stock_logits, stock_loss, stock_gradients = run()
    with isobit.enabled(model):
        logits, loss, gradients = run()
    assert not bits.equal(logits, build_reference(name, weights))  # the cast took place
    torch.testing.assert_close(logits, stock_logits, atol=0.03, rtol=0.03)
    torch.testing.assert_close(loss.float(), stock_loss.float(), atol=0.01, rtol=0.01)
    for name, gradient in gradients.items():
        apart = (gradient - stock_gradients[name]).norm() / stock_gradients[name].norm()
        assert apart < 0.05, name


def build_reference(name, weights):
    """Logits of the enabled model in fp32, where nothing is cast."""
    model = build_model(name, weights).float()
    with isobit.enabled(model), torch.no_grad():
        return model(IDS).logits


def test_every_way_of_calling_agrees():
    model = build_model("qwen3-tiny", torch.float32)
    mask = torch.ones_like(IDS)
    with isobit.enabled(model), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS).logits
        assert bits.equal(model(IDS, use_cache=False).logits, logits)
        selected = isobit.logprobs(model, IDS)[:, :-1]
        assert bits.equal(
            isobit.log_softmax(logits)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0], selected
        )
        asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        made = model.generate(
            IDS, attention_mask=mask, **asked, output_logits=True, return_dict_in_generate=True
        )
        rolled = isobit.log_softmax(torch.stack(made.logits, 1)).gather(
            -1, made.sequences[:, -4:, None]
        )[..., 0]
        assert bits.equal(isobit.logprobs(model, made.sequences)[:, -5:-1], rolled)


def test_autocast_that_is_off_changes_nothing():
    model = build_model("qwen3-tiny", torch.float32)
    with isobit.enabled(model), torch.no_grad():
        expected = model(IDS).logits
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert bits.equal(model(IDS).logits, expected)


def test_a_share_under_autocast_is_refused_and_the_remedy_works():
    model = build_model("llama-tiny", torch.float32).train()
    isobit.enable(model)
    whole = copy.deepcopy(model).to(torch.bfloat16)
    gradients = Gradients(model, GlobalBatch(of=2, micro_batches=2))
    with (
        pytest.raises(UnsupportedError, match=r"(?s)torch\.autocast.*model\.to\(torch\.bfloat16\)"),
        gradients.micro_batch(0),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(IDS[:1], labels=IDS[:1], use_cache=False)
    gradients.close()
    model.to(torch.bfloat16)
    gradients = Gradients(model, GlobalBatch(of=2, micro_batches=2))
    for row in range(2):
        with gradients.micro_batch(row):
            found = model(
                IDS[row : row + 1],
                labels=IDS[row : row + 1],
                num_items_in_batch=22,
                use_cache=False,
            )
            found.loss.backward()
    whole(IDS, labels=IDS, num_items_in_batch=22, use_cache=False).loss.backward()
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert bits.equal(found.grad, wanted.grad)
