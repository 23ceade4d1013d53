"""A dropout mask is a function of (seed, step, sample of the global batch, position, module, channel).

1. The same in every layout of the same samples: alone, padded left and right, packed, micro-batches. Four wrong masks
   are told from it.
2. Each part of the key matters; three masks that leave one out are told from it. Frequencies are those of p.
3. The gradient has the mask of the forward. Without a key, or without the sample's number, a call raises.
"""

import pytest
import torch
from wrong_masks import WRONG_IN_A_LAYOUT, WRONG_IN_THE_KEY, keyed

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.integrations.transformers.dropout import drop_by_layout
from isobit.integrations.transformers.layout import read_layout
from isobit.ops.share import Share, collecting
from isobit.sampling import dropout_key, keyed_dropout

LENGTHS, CHANNELS, P = (5, 9, 3, 9), 33, 0.4


def padded(lengths, side, extra=0):
    width = max(lengths) + extra
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    mask = mask.flip(-1) if side == "left" else mask
    return read_layout((len(lengths), width), attention_mask=mask), mask.bool()


def packed(lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return read_layout((1, sum(lengths)), position_ids=positions), torch.ones_like(positions).bool()


def layouts():
    """Yield (name, [(layout, mask of tokens, first sample, indices of its samples)])."""
    everything = list(range(len(LENGTHS)))
    for side in ("left", "right"):
        yield side, [(*padded(LENGTHS, side, 2), 0, everything)]
    yield "packed", [(*packed(LENGTHS), 0, everything)]
    yield (
        "alone",
        [(*padded([LENGTHS[at]], "right"), at, [at]) for at in everything],
    )
    yield (
        "two micro-batches",
        [
            (*padded([LENGTHS[i] for i in part], side), part[0], part)
            for part, side in (([0, 1], "left"), ([2, 3], "right"))
        ],
    )


def masks_by_sample(subject, calls, **key):
    """Return the mask of each sample, [positions, channels], over all calls of a layout."""
    found = {}
    for layout, real, first, which in calls:
        x = torch.ones(*real.shape, CHANNELS)
        y = subject(x, P, layout, first, **key)[real]
        for at, rows in zip(which, y.split([LENGTHS[i] for i in which]), strict=True):
            found[at] = rows
    return found


def agrees(subject, **key):
    cases = [masks_by_sample(subject, calls, **key) for _, calls in layouts()]
    return all(bits.equal(case[at], cases[0][at]) for case in cases for at in case)


def test_a_mask_is_the_same_in_every_layout():
    assert agrees(keyed)
    masks = masks_by_sample(keyed, next(layouts())[1])
    assert not bits.equal(masks[1], masks[3])  # of one length: each sample has its own


@pytest.mark.parametrize("wrong", WRONG_IN_A_LAYOUT, ids=lambda each: each.__name__)
def test_masks_that_depend_on_the_layout_are_told(wrong):
    assert not agrees(wrong)


def depends_on_key(subject):
    """Return whether seed, step, module and channel each change the mask."""
    calls = next(layouts())[1]
    plain = masks_by_sample(subject, calls)[1]
    others = [
        masks_by_sample(subject, calls, **{name: value})[1]
        for name, value in (("seed", 8), ("step", 4), ("module", "k_proj"))
    ]
    columns = {tuple(column.tolist()) for column in plain.T}
    return not any(bits.equal(plain, other) for other in others) and len(columns) > CHANNELS / 2


def test_each_part_of_the_key_matters():
    assert depends_on_key(keyed)


@pytest.mark.parametrize("wrong", WRONG_IN_THE_KEY, ids=lambda each: each.__name__)
def test_masks_that_leave_a_part_of_the_key_out_are_told(wrong):
    assert agrees(wrong)
    assert not depends_on_key(wrong)


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_and_scale(p, dtype):
    x = torch.full((64, 256), 3.0, dtype=dtype)
    y = keyed_dropout(x, p, seed=1, step=0, samples=list(range(64)), positions=0, module="m")
    assert y.dtype == dtype
    share = float((y == 0).double().mean())
    assert abs(share - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-12
    assert set(y.unique().tolist()) <= {0.0, float(torch.tensor(3.0, dtype=dtype) * (1 / (1 - p)))}


def test_the_gradient_has_the_mask_of_the_forward_and_nan_is_dropped():
    x = torch.randn(7, 33, requires_grad=True)
    asked = {"seed": 1, "step": 2, "samples": 3, "positions": list(range(7)), "module": "m"}
    y = keyed_dropout(x, 0.3, **asked)
    given = torch.randn(7, 33)
    y.backward(given)
    assert bits.equal(x.grad, keyed_dropout(given, 0.3, **asked))
    broken = keyed_dropout(torch.full((7, 33), torch.nan), 0.3, **asked)
    assert torch.equal(broken == 0, y == 0)


def test_a_call_without_key_or_number_raises():
    layout, real = padded(LENGTHS, "left")
    x = torch.ones(*real.shape, CHANNELS)
    with pytest.raises(UnsupportedError, match=r"(?s)no key.*dropout_key.*lora_dropout=0"):
        drop_by_layout(layout, x, P, "q_proj")
    for wrong in ({"p": 1.0}, {"p": -0.1}, {"p": float("nan")}, {"samples": [1, 2]}):
        asked = {"p": 0.5, "seed": 0, "step": 0, "samples": 0, "positions": 0, "module": "m"}
        with pytest.raises(ArgumentError):
            keyed_dropout(torch.ones(7, 3), **{**asked, **wrong})
    with pytest.raises(ArgumentError, match="step"), dropout_key(seed=0, step=0.5):
        pass


def test_samples_are_numbered_by_the_share_and_not_known_on_other_ranks(monkeypatch):
    whole, real = padded(LENGTHS, "left")
    x = torch.ones(*real.shape, CHANNELS)
    with dropout_key(seed=7, step=3):
        expected = drop_by_layout(whole, x, P, "q_proj")
        with collecting(Share(2, 4, 2)):
            part = padded(LENGTHS[2:], "left")[0]
            found = drop_by_layout(part, x[2:], P, "q_proj")
            assert bits.equal(found, expected[2:])
    again = drop_by_layout(
        whole, x, P, "q_proj"
    )  # as a checkpoint recomputes it, outside of the block
    assert bits.equal(again, expected)
    with dropout_key(seed=7, step=3, first=2):
        part = padded(LENGTHS[2:], "left")[0]
        assert bits.equal(drop_by_layout(part, x[2:], P, "q_proj"), expected[2:])
        with collecting(Share(0, 4, 2)), pytest.raises(ArgumentError, match="first"):
            drop_by_layout(padded(LENGTHS[:2], "left")[0], x[:2], P, "q_proj")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with dropout_key(seed=7, step=3), pytest.raises(UnsupportedError, match="one of 2 ranks"):
        drop_by_layout(padded(LENGTHS, "left")[0], x, P, "q_proj")


def test_no_generator_is_read():
    before = torch.get_rng_state()
    isobit.sampling.keyed_dropout(
        torch.ones(4, 4), 0.5, seed=0, step=0, samples=0, positions=0, module="m"
    )
    assert torch.equal(torch.get_rng_state(), before)
