"""The oracle names the class of every planted difference, and finds none between engine and trainer that agree.

Rollouts are decoded in a left-padded batch with a cache and keyed sampling, and scored alone and whole by the trainer:
zero of all log-probabilities and of all values of full rows differ. Then one thing is spoiled at a time.
"""

import pytest
import sabotage as s
import spoiled_weights as w
import torch
from other_arithmetic import ARITHMETIC, with_trainer

import isobit
from isobit.rollout import compare

POLICIES = {"hot": s.HOT, "cut": s.CUT, "top": s.TOP, "greedy": s.Policy(0.0, 0, 1.0, "full")}


@pytest.fixture(scope="module")
def sides():
    found = {}
    for name, policy in POLICIES.items():
        rollout = s.roll_out(policy)
        found[name] = rollout, s.score(rollout)
    return found


@pytest.mark.parametrize("name", ["hot", "cut", "top"])
def test_engine_and_trainer_agree(sides, name):
    found = compare(*sides[name])
    assert found.findings == ()
    assert found.equal
    assert (found.tokens, found.tokens_differ) == (len(s.PROMPTS) * s.NEW, 0)
    assert found.row_values == found.tokens * s.model_of().config.vocab_size
    assert found.row_values_differ == 0
    assert found.tensors == len(s.model_of().state_dict())
    exact = {"training/rollout_probs_diff_max", "rollout_corr/k3_kl", "logprob_diff/max"}
    assert all(found.metrics[key] == 0 for key in exact)
    assert found.metrics["token_mult_prob_error"] == 1


SEMANTICS = [
    ("hot", s.at_temperature_one, "temperature"),
    ("hot", s.temperature_declared, "temperature"),
    ("hot", s.raw_logprobs, "temperature"),
    ("hot", s.temperature_twice, "temperature"),
    ("cut", s.top_p_unscored, "truncation"),
    ("cut", s.truncation_undeclared, "truncation"),
    ("top", s.top_k_undeclared, "truncation"),
    ("cut", s.other_top_p, "truncation"),
    ("top", s.highest_id_in_support, "tie rule"),
    ("greedy", s.greedy_tie, "tie rule"),
    ("hot", s.shifted_logprobs, "shift"),
    ("hot", s.shifted_ahead, "shift"),
    ("hot", s.shifted_ids, "shift"),
    ("hot", s.last_token_masked, "mask"),
    ("hot", s.first_token_masked, "mask"),
    ("hot", s.begin_of_sequence_added, "prompt"),
    ("hot", s.tokenized_again, "ids"),
    ("hot", s.padding_in_positions, "positions"),
    ("hot", s.logits_for_logprobs, "normaliser"),
    ("hot", s.normalised_over_a_part, "normaliser"),
    ("hot", s.a_sequence_dropped, "sequences"),
    ("hot", s.a_penalty_on_one_side, "processors"),
]
WEIGHTS = [
    (w.with_engine(w.older), {"stale"}, None),
    (w.with_engine(w.only("layers.0.mlp.up_proj")), {"stale"}, "layers.0.mlp.up_proj"),
    (
        w.with_engine(w.only("layers.1.self_attn.k_proj", slice(20, None))),
        {"half-written"},
        "layers.1.self_attn.k_proj",
    ),
    (w.with_engine(w.swap_gate_and_up), {"wrong"}, "layers.0.mlp."),
    (w.with_engine(w.one_bit, previous=False), {"half-written"}, "layers.0.mlp.down_proj"),
    (w.with_engine(w.rounded_on_the_way), {"wrong"}, "layers.1.self_attn.o_proj"),
    (w.a_tensor_missing, {"missing"}, "layers.1.mlp.down_proj"),
    (w.another_dtype, {"dtype"}, None),
]


@pytest.mark.parametrize(
    ("name", "spoil", "kind"), SEMANTICS, ids=lambda x: getattr(x, "__name__", None)
)
def test_semantics_are_named(sides, name, spoil, kind):
    found = compare(*spoil(*sides[name]))
    assert found.exit_code == 1
    assert (found.cause, found.findings[0].kind) == ("semantics", kind), found.findings
    assert {one.cause for one in found.findings} == {"semantics"}
    assert found.findings[0].remedy


@pytest.mark.parametrize("at", range(len(WEIGHTS)))
def test_weights_are_named(sides, at):
    spoil, kinds, name = WEIGHTS[at]
    found = compare(*spoil(*sides["hot"]))
    assert {one.cause for one in found.findings} == {"weights"}, found.findings
    assert {one.kind for one in found.findings} == kinds, found.findings
    if name:
        assert all(name in one.first for one in found.findings)


@pytest.mark.parametrize("make", ARITHMETIC, ids=lambda f: f.__name__)
def test_numerics_are_named(sides, make):
    found = compare(*with_trainer(make)(*sides["hot"]))
    assert [one.cause for one in found.findings] == ["numerics"], found.findings
    assert found.tokens_differ > 0 or found.row_values_differ > 0
    assert found.metrics["logprob_diff/max"] < 0.5


def test_there_are_twenty_five_sabotages_or_more(capsys):
    kinds = {"semantics": SEMANTICS, "weights": WEIGHTS, "numerics": ARITHMETIC}
    total = sum(map(len, kinds.values()))
    with capsys.disabled():
        said = ", ".join(f"{len(planted)} of {name}" for name, planted in kinds.items())
        print(f"\n{total} sabotages, each a test above: {said}")
    assert total >= 25


def test_without_digests_weights_and_numerics_are_not_told_apart(sides):
    rollout, trainer = with_trainer(ARITHMETIC[0])(*sides["hot"])
    found = compare(rollout, s.replace(trainer, weights=None))
    assert (found.cause, found.findings[0].kind) == ("undetermined", "weights or numerics")
    assert any("no digests" in note for note in found.notes)


def test_one_bit_of_one_log_probability_or_row_is_found(sides):
    rollout, trainer = sides["hot"]
    for part in ("logprobs", "rows"):
        spoiled = [
            s.replace(one, **{part: getattr(one, part).clone()}) for one in trainer.sequences
        ]
        getattr(spoiled[1], part).view(torch.int32).view(-1)[-1] ^= 1
        found = compare(rollout, s.replace(trainer, sequences=tuple(spoiled)))
        assert (found.cause, found.tokens_differ + found.row_values_differ) == ("numerics", 1)


def test_a_nan_on_both_sides_is_no_agreement(sides):
    rollout, trainer = (
        s.each(side, logprobs=lambda one: one.logprobs.clone()) for side in sides["hot"]
    )
    for side in (rollout, trainer):
        side.sequences[1].logprobs[3] = torch.nan
    found = compare(rollout, trainer)
    assert (found.cause, found.findings[0].kind, found.findings[0].differ) == (
        "numerics",
        "not finite",
        2,
    )


def test_rows_of_other_vocabularies_are_noted(sides):
    rollout, trainer = sides["hot"]
    found = compare(rollout, s.each(trainer, rows=lambda one: one.rows[:, :-5]))
    assert found.row_values == 0
    assert any("full rows of" in note for note in found.notes)


def test_nothing_to_compare_is_no_pass(sides):
    rollout, trainer = sides["hot"]
    found = compare(s.each(rollout, logprobs=None), trainer)
    assert (found.exit_code, found.equal) == (2, False)
    assert "nothing was compared" in found.sentence
    empty = s.replace(rollout, sequences=())
    assert compare(empty, empty).exit_code == 2
    masked = s.each(rollout, mask=torch.zeros(s.NEW, dtype=torch.bool))
    assert compare(masked, masked).exit_code == 2


def test_metrics_are_those_of_their_frameworks():
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    trainer = [torch.tensor([-1.5, -2.0]), torch.tensor([-0.25])]
    found = isobit.rollout.mismatch_metrics(rollout, trainer)
    ratio = torch.tensor([-0.5, 0.0, 0.25]).double()
    probs = (torch.cat(trainer).double().exp() - torch.cat(rollout).double().exp()).abs()
    expected = {
        "train_rollout_logprob_abs_diff": 0.25,  # the mean of 0.25 and 0.25
        "training/rollout_probs_diff_std": float(probs.std()),
        "rollout_corr/k3_kl": float((ratio.exp() - ratio - 1).mean()),
        "rollout_corr/kl": float(-ratio.mean()),
        "token_mult_prob_error": float(ratio.abs().exp().mean()),
        "vllm_vs_local_logprob_diff_mean": 0.25,
        "clip_share_0.2": 2 / 3,
    }
    for name, value in expected.items():
        assert abs(found[name] - value) < 1e-12, name
    assert isobit.rollout.mismatch_metrics([], []) == {}
