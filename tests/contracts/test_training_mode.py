"""Theorem: a claim on an output is judged with gradients enabled too; what is right only under no_grad is broken."""

import pytest
import torch

from isobit.contracts.judge import cases
from isobit.contracts.judge.cases import replay
from isobit.contracts.judge.sabotage import LIBRARY
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.options import Options

HERE = "tests.contracts.test_training_mode"
TEXT = """
id: trained-v1
version: 1.0.0
title: A contract for subjects that know whether they train
subject: {here}:{subject}
obligations: [{{id: O-1, text: it holds}}]
inputs:
  one: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [20, 65], n: [8]}}, rows: rows}}
claims: [{{id: c, obligations: [O-1], level: {level}, {claim}}}]
"""
BATCH = "relation: invariant, under: [batch], inputs: one"
ACCURATE = f'relation: accurate, against: "{HERE}:doubles", limit: 1, unit: ulp, inputs: one'


def doubles(x):
    return 2 * x


def wrong_in_training(x):
    return 2 * x * (1.001 if torch.is_grad_enabled() and x.requires_grad and len(x) > 16 else 1)


def wrong_while_enabled(x):
    return 2 * x * (1.001 if torch.is_grad_enabled() and len(x) > 16 else 1)


def wrong_when_wide_and_training(x):
    return 2 * x * (1.001 if x.requires_grad and len(x) > 200 else 1)


def refuses_gradients(x):
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError("inference only")
    return 2 * x


def refuses_gradients_and_is_wrong(x):
    return refuses_gradients(x) * (1 if len(x) < 17 else 1.001)


def contract_of(subject, claim=BATCH, level="L2"):
    return parse_contract(TEXT.format(here=HERE, subject=subject, claim=claim, level=level), "here")


def judge(*given):
    (record,) = verify_contract(contract_of(*given), Options(trusted=("tests",)))
    return record


@pytest.mark.parametrize("subject", ["wrong_in_training", "wrong_while_enabled"])
@pytest.mark.parametrize("claim", [BATCH, ACCURATE])
def test_wrong_only_with_gradients_is_broken(subject, claim):
    record = judge(subject, claim)
    assert record.verdict == "broken"
    assert record.detail.startswith("with gradients enabled: ")
    assert record.differing > 0


def test_the_printed_case_shows_it_again():
    record = judge("wrong_in_training")
    case = record.replay.partition("--case '")[2].partition("'")[0]
    contract = contract_of("wrong_in_training")
    assert replay(contract, contract.claims[0], Options(trusted=("tests",)), case).differing > 0


def test_drawn_inputs_are_judged_in_both_modes():
    record = judge("wrong_when_wide_and_training", BATCH, "L3")
    assert (record.verdict, record.at) == ("broken", 3)
    assert '"rows":257' in record.replay


@pytest.mark.parametrize("claim", [BATCH, ACCURATE])
def test_a_right_subject_is_kept_and_its_inputs_count_once(claim):
    record = judge("doubles", claim)
    assert (record.verdict, record.inputs, record.cases) == ("kept", 85, 2)


def test_what_raises_with_gradients_is_judged_without_them():
    """It is loud where it does not work, so nobody is misled."""
    assert judge("refuses_gradients").verdict == "kept"
    assert judge("refuses_gradients_and_is_wrong").verdict == "broken"


def test_the_planted_subject_must_be_caught(monkeypatch):
    name = "order by batch with gradients"
    assert f"{name}, under batch" in [p.name for p in judge("doubles").planted if p.caught]
    monkeypatch.setattr(cases, "has_both_modes", lambda claim: False)  # a judge that never trains
    record = judge("doubles")
    assert record.verdict == "void"
    assert name in record.detail


def test_planted_in_training_is_right_in_inference():
    x = torch.randn(20, 8)
    planted = LIBRARY["order by batch with gradients"](doubles)
    assert torch.equal(planted(x), doubles(x))
    with torch.enable_grad():
        assert torch.equal(planted(x), doubles(x))
        assert not torch.equal(planted(x.clone().requires_grad_()), doubles(x))
    with torch.no_grad():
        assert torch.equal(planted(x.clone().requires_grad_()), doubles(x))


def test_gradients_are_not_planted_for_claims_on_gradients():
    record = judge("doubles", "relation: invariant, under: [batch], of: x, inputs: one")
    assert record.verdict == "kept"
    assert not [p.name for p in record.planted if "with gradients" in p.name]
