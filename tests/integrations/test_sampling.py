"""generate() with KeyedSampling draws as isobit.sampling does: alone, padded, in any batch, and resumed.

1. The same bits alone, in any batch, at any padding, and when generation is resumed; torch.multinomial's are not.
2. Wrong arguments are refused.
"""

import math

import pytest
import torch

import isobit
from isobit import ArgumentError, bits

transformers = pytest.importorskip("transformers")
from isobit.integrations.transformers.sampling import KeyedSampling  # noqa: E402
from isobit.sampling import sample  # noqa: E402

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
    for row, name in enumerate([4, 8, 15, 16, 23]):
        alone = KeyedSampling(3, samples=[name], attention_mask=None, **options)(
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


def test_the_draw_is_that_of_the_shared_sampler():
    scores, ids = 3 * torch.randn(5, VOCABULARY), torch.zeros(5, 9, dtype=torch.int64)
    found = KeyedSampling(3, 0.7, 40, 0.9, [4, 8, 15, 16, 23], attention_mask=None)(ids, scores)
    asked = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
    drawn = sample(scores, seed=3, requests=[4, 8, 15, 16, 23], positions=9, **asked)
    assert found.argmax(-1).tolist() == drawn.tokens.tolist()
    assert (found > -torch.inf).sum(-1).tolist() == [1] * 5


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
    return isobit.enable(transformers.Qwen3ForCausalLM(config).eval())


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


# ---- 2. refusals --------------------------------------------------------------------------------------


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
