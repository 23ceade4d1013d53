"""A draw depends on seed, sample and position alone, and has the softmax's distribution.

1. The same bits alone, in any batch, at any padding, and when generation is resumed; torch.multinomial's are not.
2. Frequencies are the softmax's, by chi-square; noise of neighbouring keys is independent.
3. top_k and top_p keep what they say; wrong arguments are refused.
"""

import math

import pytest
import torch

from isobit import ArgumentError, bits

transformers = pytest.importorskip("transformers")
from isobit.integrations.transformers.sampling import (  # noqa: E402
    KeyedSampling,
    gumbel_noise,
    keep_most_likely,
    log,
)

VOCABULARY = 1003


# ---- 1. what must not matter -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.5, "temperature": 2}]
)
def test_a_row_is_the_same_alone_and_in_a_batch(options):
    scores = 3 * torch.randn(5, VOCABULARY)
    ids = torch.zeros(5, 9, dtype=torch.int64)
    whole = KeyedSampling(3, samples=[4, 8, 15, 16, 23], attention_mask=None, **options)(
        ids, scores
    )
    for row, sample in enumerate([4, 8, 15, 16, 23]):
        alone = KeyedSampling(3, samples=[sample], attention_mask=None, **options)(
            ids[:1], scores[row : row + 1]
        )
        assert bits.equal(alone, whole[row : row + 1])
    order = torch.tensor([3, 0, 4, 1, 2])
    names = torch.tensor([4, 8, 15, 16, 23])[order]
    moved = KeyedSampling(3, samples=names, attention_mask=None, **options)(ids, scores[order])
    assert bits.equal(moved, whole[order])


def test_left_padding_does_not_matter():
    scores, mask = (
        torch.randn(2, VOCABULARY),
        torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    )
    padded = KeyedSampling(3, attention_mask=mask)
    for grown in (0, 1, 5):  # the mask is the prompt's; tokens follow
        found = padded(torch.zeros(2, 6 + grown, dtype=torch.int64), scores)
        alone = KeyedSampling(3, attention_mask=None)(
            torch.zeros(1, 3 + grown, dtype=torch.int64), scores[:1]
        )
        assert bits.equal(found[:1], alone)


def test_seed_sample_position_and_token_all_matter():
    base = gumbel_noise(1, torch.tensor([2]), torch.tensor([3]), 50)
    for seed, sample, position in (
        (0, 2, 3),
        (1, 3, 3),
        (1, 2, 4),
        (1, 3, 2),
        (-1, 2, 3),
        (2**63 + 1, 2, 3),
    ):
        other = gumbel_noise(seed, torch.tensor([sample]), torch.tensor([position]), 50)
        assert not (other == base).any()
    assert len(set(base.flatten().tolist())) == 50
    assert bits.equal(gumbel_noise(1, torch.tensor([2]), torch.tensor([3]), 99)[:, :50], base)


def test_the_control_depends_on_the_batch():
    weights = torch.softmax(torch.randn(4, VOCABULARY), -1)
    whole = [
        torch.multinomial(weights, 1, generator=torch.Generator().manual_seed(s))[3]
        for s in range(8)
    ]
    alone = [
        torch.multinomial(weights[3:], 1, generator=torch.Generator().manual_seed(s))[0]
        for s in range(8)
    ]
    assert [int(t) for t in whole] != [int(t) for t in alone]


def tiny_model():
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    return (
        transformers.Qwen3ForCausalLM(config).double().eval()
    )  # fp64: stock's own differences choose no token


def test_generate_gives_a_sample_the_same_tokens_alone_padded_and_resumed():
    model = tiny_model()
    long, short = torch.randint(1, 97, (1, 7)), torch.randint(1, 97, (1, 4))
    ids = torch.cat([long, torch.cat([torch.zeros(1, 3, dtype=torch.int64), short], 1)])
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])

    def generate(ids, mask, samples, count):
        processor = KeyedSampling(5, temperature=2.0, samples=samples, attention_mask=mask)
        return model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            logits_processor=[processor],
        )

    both = generate(ids, mask, [10, 11], 8)
    alone = generate(short, torch.ones_like(short), [11], 8)
    assert both[1, 3:].tolist() == alone[0].tolist()
    begun = generate(short, torch.ones_like(short), [11], 3)
    assert generate(begun, torch.ones_like(begun), [11], 5)[0].tolist() == alone[0].tolist()
    other = generate(short, torch.ones_like(short), [12], 8)
    assert other[0].tolist() != alone[0].tolist()


# ---- 2. the distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_are_the_softmaxs(temperature):
    count, scores = 100_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0])
    processor = KeyedSampling(11, temperature, attention_mask=None)
    drawn = processor(torch.zeros(count, 4, dtype=torch.int64), scores.expand(count, -1)).argmax(-1)
    expected = count * torch.softmax(scores.double() / temperature, -1)
    seen = torch.bincount(drawn, minlength=7).double()
    assert ((seen - expected) ** 2 / expected).sum() < 22.5  # 6 degrees of freedom: 1 in 1000


def test_positions_of_one_sample_are_independent():
    count = 50_000
    noise = gumbel_noise(2, torch.zeros(count, dtype=torch.int64), torch.arange(count), 2)
    drawn = noise.argmax(-1).double() - 0.5
    assert abs((drawn[1:] * drawn[:-1]).mean() * 4) < 4 / math.sqrt(count)
    assert abs(drawn.mean() * 2) < 4 / math.sqrt(count)
    assert abs(noise.mean() - 0.5772156649) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.04


def test_the_logarithm():
    small = 2.0 ** -torch.arange(1, 52, dtype=torch.float64)
    x = torch.cat([torch.rand(10_000, dtype=torch.float64), small, 1 - small])
    assert torch.allclose(log(x), x.log(), rtol=1e-9, atol=0)


# ---- 3. what may be drawn, and refusals ------------------------------------------------------------------


def test_top_k_and_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().double()
    assert keep_most_likely(logits, 2, None).tolist() == [[True, True, False, False]]
    assert keep_most_likely(logits, None, 0.79).tolist() == [[True, True, False, False]]
    assert keep_most_likely(logits, None, 0.81).tolist() == [[True, True, True, False]]
    assert keep_most_likely(logits, None, 0.01).tolist() == [[True, False, False, False]]
    assert keep_most_likely(logits, 2, 0.6).tolist() == [
        [True, False, False, False]
    ]  # 5/8 of the two
    assert keep_most_likely(logits, 9, 1.0).all()


def test_top_p_keeps_what_transformers_keeps():
    scores = 3 * torch.randn(20, VOCABULARY)
    theirs = transformers.TopPLogitsWarper(0.9)(None, scores).isfinite()
    assert (
        keep_most_likely(scores.double(), None, 0.9) != theirs
    ).sum() <= 2  # they add fp32 in some order


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"attention_mask": torch.tensor([[1, 1, 0]])},
        {"attention_mask": torch.tensor([1, 1])},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ArgumentError, match="remedy"):
        KeyedSampling(0, **{"attention_mask": None, **options})


def test_a_mask_must_be_given():
    with pytest.raises(ArgumentError, match="attention_mask=None if no prompt is padded"):
        KeyedSampling(0)


def test_wrong_row_counts_are_refused():
    ids, scores = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 5)
    for options in ({"samples": [1, 2]}, {"attention_mask": torch.ones(2, 2)}):
        with pytest.raises(ArgumentError, match="rows"):
            KeyedSampling(0, **{"attention_mask": None, **options})(ids, scores)
