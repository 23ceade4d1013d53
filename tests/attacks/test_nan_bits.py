"""NaN is one NaN: its bits depend neither on where it stands nor on what it was made of."""

import pytest
import torch

import isobit
from isobit import bits
from isobit.ops.portable.sums import round_once
from tests.attacks.operators import FEATURES, ROWS, calls, draw, force_portable

QUIET = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
NEGATIVE = {
    torch.float32: -0x3FFFFF,
    torch.bfloat16: -1,
    torch.float16: -1,
}  # all bits set but a few


def nan_bits(tensor):
    """The different bits of a tensor's NaNs."""
    return set(bits.as_integers(tensor)[tensor.isnan()].tolist())


def strange_nans(*shape, dtype):
    """Finite values, and NaNs of other signs and payloads among them."""
    x = draw(*shape, dtype=dtype)
    whole = bits.as_integers(x)
    whole[..., 1::7] = NEGATIVE[dtype]
    x = whole.view(dtype)
    assert x.isnan().any()
    return x


@pytest.mark.parametrize("dtype", QUIET, ids=str)
def test_rounding_gives_one_nan(dtype):
    total = strange_nans(4, 67, dtype=torch.float32)
    assert nan_bits(round_once(total, dtype)) == {QUIET[dtype]}


@pytest.mark.parametrize("executor", ["native or portable", "portable"])
@pytest.mark.parametrize("dtype", QUIET, ids=str)
def test_operators_give_one_nan(dtype, executor, monkeypatch):
    if executor == "portable":
        force_portable(monkeypatch)
    for name, call in calls(dtype).items():
        if name in ("embedding", "select_rows", "dispatch_rows"):
            continue  # they copy bits
        x = strange_nans(ROWS, FEATURES, dtype=dtype).requires_grad_()
        y = call(x)
        y.backward(
            strange_nans(*y.shape, dtype=y.dtype) if y.dim() else torch.full_like(y, torch.nan)
        )
        assert nan_bits(y.detach()) <= {QUIET[y.dtype]}, name
        assert nan_bits(x.grad) <= {QUIET[dtype]}, name
        assert x.grad.isnan().any(), name


@pytest.mark.parametrize("dtype", QUIET, ids=str)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_clipping_gives_one_nan_however_gradients_are_cut(dtype, bad):
    grads = draw(70, dtype=dtype)
    grads[::3] = bad

    def clipped(*pieces):
        parameters = [torch.nn.Parameter(torch.zeros_like(piece)) for piece in pieces]
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.clone()
        isobit.optim.clip_grad_norm_(parameters, 1.0)
        return torch.cat([p.grad for p in parameters])

    whole = clipped(grads)
    assert nan_bits(whole) == {QUIET[dtype]}
    assert bits.equal(whole, clipped(*grads.split(5)))
