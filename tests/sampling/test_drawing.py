"""A draw depends on (seed, request, position) and its own row; its log p is that of the policy that drew it.

1. The same tokens, kept ids and log-probabilities alone, in any batch and order, with other options in other rows.
2. Kept ids and ties are those of a definition in plain Python; log p is that of exact fractions' logarithm.
3. Frequencies are those of the kept softmax. Ten wrong samplers differ from the definition. Wrong input raises.
"""

import math

import pytest
import torch
from wrong_samplers import WRONG

from isobit import ArgumentError, bits
from isobit.sampling import Truncation, request_number, sample, support_ids

VOCABULARY = 203
OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.6},
]


def draw_logits(rows, seed=0):
    """Wide logits of which every third row has ties on a coarse grid, also at its top."""
    x = 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    x[::3] = (x[::3] * 0.5).round()
    return x


def same(a, b):
    return all(
        bits.equal(x, y)
        for x, y in ((a.tokens, b.tokens), (a.logprobs, b.logprobs), (a.kept, b.kept))
    )


def row(drawn, at):
    return type(drawn)(
        drawn.tokens[at : at + 1], drawn.logprobs[at : at + 1], drawn.kept[at : at + 1]
    )


# ---- 1. what must not matter -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_is_the_same_alone_and_in_any_batch(options):
    logits, requests, positions = draw_logits(9), list(range(40, 49)), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    whole = sample(logits, seed=7, requests=requests, positions=positions, **options)
    compared = 0
    for at in range(9):
        one = slice(at, at + 1)
        alone = sample(
            logits[one], seed=7, requests=requests[one], positions=positions[one], **options
        )
        assert same(alone, row(whole, at))
        compared += 1
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    moved = sample(
        logits[order],
        seed=7,
        requests=torch.tensor(requests)[order],
        positions=torch.tensor(positions)[order],
        **options,
    )
    assert all(same(row(moved, i), row(whole, int(at))) for i, at in enumerate(order))
    assert compared == 9


def test_options_may_differ_per_row():
    logits = draw_logits(6)
    rows = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options} for options in OPTIONS]
    mixed = sample(
        logits,
        seed=list(range(6)),
        requests=2,
        positions=3,
        **{name: [one[name] for one in rows] for name in ("temperature", "top_k", "top_p")},
    )
    for at, options in enumerate(OPTIONS):
        alone = sample(logits[at : at + 1], seed=at, requests=2, positions=3, **options)
        assert same(alone, row(mixed, at)), options


# ---- 2. the definition -----------------------------------------------------------------------------------


def ranked(values):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def define(logits, options):
    """Return kept ids and the function from token to log p of one row, in plain Python and fp64."""
    heat = options.get("temperature", 1.0)
    order = ranked(logits.tolist())
    scaled = (logits * (1.0 / torch.tensor(heat or 1.0))).double()
    if heat == 0:
        return {order[0]}, {order[0]: 0.0}
    kept = order[: options.get("top_k") or None]
    if options.get("top_p", 1.0) < 1:
        weights = scaled[kept].softmax(-1).tolist()
        total, count = 0.0, 0
        while total < options["top_p"]:
            total, count = total + weights[count], count + 1
        kept = kept[:count]
    log_sum = float(scaled[kept].logsumexp(-1))
    return set(kept), {i: float(scaled[i]) - log_sum for i in kept}


def judge(sampler):
    """Return the first way in which a sampler differs from the definition, or "" ."""
    logits, requests, seen = draw_logits(12), list(range(12)), set()
    for options in OPTIONS:
        named = {"seed": 3, "positions": 5, **options}
        drawn = sampler(logits, requests=requests, **named)
        for at in range(12):
            kept, logprobs = define(logits[at], options)
            if set(drawn.kept[at].nonzero()[:, 0].tolist()) != kept:
                return f"kept ids of row {at}, {options}"
            token = int(drawn.tokens[at])
            if token not in kept:
                return f"token {token} was not kept, {options}"
            if not math.isclose(float(drawn.logprobs[at]), logprobs[token], abs_tol=3e-6):
                return f"log p of row {at}, {options}"
            alone = sampler(logits[at : at + 1], requests=[at], **named)
            if not same(alone, row(drawn, at)):
                return f"row {at} alone, {options}"
        other = sampler(logits, requests=requests, **{**named, "positions": 6})
        again = sampler(logits, requests=requests, **{**named, "seed": 4})
        seen.add(tuple(drawn.tokens.tolist()) == tuple(other.tokens.tolist()))
        seen.add(tuple(drawn.tokens.tolist()) == tuple(again.tokens.tolist()))
        if options == {} and True in seen:
            return "position or seed has no effect"
    return ""


def test_sample_is_the_definition():
    assert judge(sample) == ""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_samplers_are_found(wrong):
    assert judge(wrong) != ""


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, -0.0, 0.0]])
    asked = {"seed": 0, "requests": 0, "positions": 0}
    assert sample(logits, temperature=0.0, **asked).tokens.tolist() == [1]
    assert support_ids(Truncation(top_k=2).keep(logits)).tolist() == [[1, 2]]
    assert support_ids(Truncation(top_k=5).keep(logits)).tolist() == [[0, 1, 2, 3, 4]]  # -0 ties 0
    assert support_ids(Truncation(top_p=0.5).keep(logits)).tolist() == [[1, 2]]
    level = torch.zeros(1, 4)
    assert support_ids(Truncation(top_p=0.5).keep(level)).tolist() == [[0, 1]]
    assert support_ids(Truncation(top_p=1e-30).keep(level)).tolist() == [[0]]


def test_a_token_at_minus_infinity_is_never_kept():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0]])
    for options in ({}, {"top_k": 3}, {"top_p": 0.999999}, {"temperature": 0.0}):
        drawn = sample(logits, seed=0, requests=0, positions=0, **options)
        assert not drawn.kept[0, [0, 2]].any()
        assert drawn.logprobs.isfinite().all()


# ---- 3. the distribution, and what is refused ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}])
def test_frequencies_are_those_of_the_kept_softmax(options):
    count, scores = 60_000, torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0])
    drawn = sample(
        scores.expand(count, -1), seed=11, requests=torch.arange(count), positions=4, **options
    )
    kept, logprobs = define(scores, options)
    expected = count * torch.tensor([math.exp(logprobs[i]) for i in sorted(kept)])
    seen = torch.bincount(drawn.tokens, minlength=7)[sorted(kept)].double()
    assert seen.sum() == count
    limit = {7: 22.5, 4: 16.3, 3: 13.9}.get(len(kept), 22.5)  # 1 in 1000
    assert ((seen - expected) ** 2 / expected).sum() < limit


def test_positions_of_one_request_are_independent():
    count = 50_000
    drawn = sample(torch.zeros(count, 2), seed=2, requests=0, positions=torch.arange(count))
    signs = drawn.tokens.double() - 0.5
    assert abs((signs[1:] * signs[:-1]).mean() * 4) < 4 / math.sqrt(count)
    assert abs(signs.mean() * 2) < 4 / math.sqrt(count)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_rows(options):
    drawn = sample(torch.zeros(0, 9), seed=1, requests=[], positions=[], **options)
    assert drawn.tokens.shape == drawn.logprobs.shape == (0,)
    assert drawn.kept.shape == (0, 9)


def test_names_of_requests():
    numbers = {request_number(f"request-{i}") for i in range(1000)}
    assert len(numbers) == 1000
    assert all(0 <= n < 2**63 for n in numbers)


KEY = {"seed": 0, "requests": 0, "positions": 0}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": [1.0, 1.0, 1.0]},
        {"top_k": -2},
        {"top_k": 2.5},
        {"top_k": [1, 2, 3]},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"requests": 1.5},
        {"requests": [1, 2, 3]},
        {"positions": torch.tensor([0.5, 1.0])},
        {"seed": True},
        {"seed": [None, 1]},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ArgumentError, match="remedy"):
        sample(torch.zeros(2, 5), **{**KEY, **options})


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(5),
        torch.zeros(2, 5).bfloat16(),
        torch.tensor([[0.0, math.nan]]),
        torch.tensor([[0.0, math.inf]]),
        torch.tensor([[0.0, 1.0], [-math.inf, -math.inf]]),
    ],
    ids=str,
)
def test_wrong_logits_are_refused(logits):
    with pytest.raises(ArgumentError, match="remedy"):
        sample(logits, **KEY)
