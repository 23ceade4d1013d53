"""The models that the audit is tried on: they run forward and backward, and their parts are right."""

import pytest
import torch

from benchmarks.audit_models import NAMES, GatedProduct, build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name, dtype):
    model, batch = build(name, "tiny", dtype, labels=True)
    found = model(**batch)
    assert torch.isfinite(found["logits"]).all()
    found["loss"].backward()
    assert [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "vit"])
def test_later_tokens_do_not_change_earlier_ones(name):
    model, batch = build(name, "tiny", torch.float32)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, -1] += 1
    with torch.no_grad():
        one, other = (getattr(out, "logits", out) for out in (model(**batch), model(**changed)))
    torch.testing.assert_close(one[:, :-1], other[:, :-1])
    assert not torch.equal(one[:, -1], other[:, -1])


def test_the_derivative_written_by_hand_is_right():
    x, gate, up = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (7, 5), (7, 5))
    )
    assert torch.autograd.gradcheck(GatedProduct.apply, (x, gate, up))
