"""Theorem: only a claim that ran, compared, can fail and did not is kept; every other outcome has its word."""

import datetime
from dataclasses import replace

import pytest
import torch

from isobit.cli.verify import differ_of
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.options import Options
from isobit.contracts.store import ladder
from isobit.errors import ContractError

TEXT = """
id: judged-v1
version: 1.0.0
title: A contract to be judged
subject: {subject}
obligations:
  - {{id: O-1, text: it holds}}
inputs:
  rows:
    arguments: {{x: [rows, n]}}
    sizes: {{rows: [{rows}], n: [8]}}
    values: wide
    rows: rows
claims:
  - id: claim
    obligations: [O-1]
    relation: {relation}
    inputs: rows
    level: {level}
    sabotage: [{sabotage}]
"""
HERE = "tests.contracts.test_verdicts"
TRUST = ("tests",)


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def raises(x):
    raise RuntimeError("no")


def returns_no_tensor(x):
    return 1.0


def cannot_fail(subject, case, tally):
    """A check that looks busy and looks at nothing."""
    subject(case.arguments["x"])
    tally.count(case.rows)
    tally.compared += 100


def looks_at_nothing(subject, case, tally):
    pass


def is_double(subject, case, tally):
    tally.count(case.rows)
    tally.same(subject(case.arguments["x"]), 2 * case.arguments["x"], "against 2x")


def judge(relation="holds\n    predicate: " + HERE + ":is_double", level="L2", **rest):
    words = {"subject": f"{HERE}:double", "rows": 4, "sabotage": f'"{HERE}:triple"'} | rest
    contract = parse_contract(TEXT.format(relation=relation, level=level, **words), "here")
    (record,) = verify_contract(contract, Options(trusted=TRUST))
    return record


def predicate(name):
    return f"holds\n    predicate: {HERE}:{name}"


def test_kept():
    record = judge()
    assert (record.verdict, record.level, record.inputs, record.compared) == ("kept", 2, 4, 32)
    assert [p.caught for p in record.planted] == [True]


def test_broken_with_a_replay():
    record = judge(subject=f"{HERE}:triple")
    assert record.verdict == "broken"
    assert record.differing == 32
    assert record.replay.startswith("isobit contract replay judged-v1/claim --case '{")


def test_a_claim_that_cannot_fail_is_void():
    record = judge(relation=predicate("cannot_fail"))
    assert record.verdict == "void"
    assert "not caught" in record.detail


def test_a_claim_that_compares_nothing_is_vacuous():
    assert judge(relation=predicate("looks_at_nothing")).verdict == "vacuous"
    empty = judge(relation="invariant\n    under: [batch]", rows=0, sabotage='"order by batch"')
    assert empty.verdict == "vacuous"


def test_a_sabotage_that_raises_is_not_caught():
    record = judge(sabotage=f'"{HERE}:raises"')
    assert record.verdict == "void"
    assert "raised RuntimeError" in record.detail


def test_a_subject_that_raises_or_returns_no_tensor_is_broken():
    assert judge(subject=f"{HERE}:raises").verdict == "broken"
    record = judge(
        relation="invariant\n    under: [batch]",
        subject=f"{HERE}:returns_no_tensor",
        sabotage='"identity"',
    )
    assert record.verdict == "broken"
    assert "expected the subject to return a tensor" in record.detail


def writes_to_its_input(x):
    return x.mul_(2)


def test_a_subject_that_writes_to_its_inputs_is_broken():
    record = judge(subject=f"{HERE}:writes_to_its_input")
    assert record.verdict == "broken"
    assert "writes to its inputs" in record.detail


def needs_a_device(x):
    raise RuntimeError("0 active drivers ([]). There should only be one.")


def asks_for_cuda(x):
    return x.cuda()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
@pytest.mark.parametrize("subject", ["needs_a_device", "asks_for_cuda"])
def test_a_subject_without_its_device_could_not_run(subject):
    for record in (
        judge(subject=f"{HERE}:{subject}"),
        judge(
            relation="invariant\n    under: [batch]",
            subject=f"{HERE}:{subject}",
            sabotage='"identity"',
        ),
    ):
        assert (record.verdict, record.level) == ("could-not-run", 0)
        assert "TRITON_INTERPRET=1" in record.detail


def test_other_errors_that_speak_of_drivers_are_broken():
    record = judge(subject=f"{HERE}:speaks_of_drivers")
    assert record.verdict == "broken"


def speaks_of_drivers(x):
    raise RuntimeError("2 drivers disagree")


def test_a_proof_that_fails_says_where():
    from isobit.foundation.records import Proof

    assert "at L4" not in differ_of(judge())
    broken = replace(
        judge(), verdict="broken", at=4, differing=0, proof=Proof("z3", "all", 3, "k = 5")
    )
    assert differ_of(broken) == "proof, at L4"


def test_could_not_run():
    record = judge(subject=f"{HERE}:not_there")
    assert record.verdict == "could-not-run"
    assert "not_there" in record.detail
    words = {"subject": f"{HERE}:double", "rows": 4, "sabotage": ""}
    contract = parse_contract(
        TEXT.format(relation=predicate("is_double"), level="L2", **words), "here"
    )
    (record,) = verify_contract(contract, Options())
    assert record.verdict == "could-not-run"
    assert "--trust tests" in record.detail


def test_unbound():
    text = TEXT.format(
        relation=predicate("is_double"), level="L2", subject="x:y", rows=4, sabotage=""
    )
    contract = parse_contract(text.replace("subject: x:y\n", ""), "here")
    (record,) = verify_contract(contract, Options(trusted=TRUST))
    assert record.verdict == "unbound"
    more = replace(
        contract, obligations=(*contract.obligations, replace(contract.obligations[0], id="O-2"))
    )
    kept = replace(record, verdict="kept", level=4)
    assert ladder.contract_verdict(more, [kept]) == "unbound"
    assert ladder.contract_level(more, [kept]) == 0
    assert ladder.contract_verdict(replace(contract, claims=()), []) == "unbound"


def test_no_sabotage_is_void():
    assert judge(sabotage="").verdict == "void"


WAIVER = "\nwaivers:\n  - {claim: claim, reason: known, owner: me, expires: 2030-01-31}\n"


@pytest.mark.parametrize("day", ["2030-01-30", "2030-01-31", "2030-02-01"])
def test_waivers_end(day):
    word = "waived" if day <= "2030-01-31" else "broken"
    text = (
        TEXT.format(relation=predicate("is_double"), level="L2", subject="x:y", rows=4, sabotage="")
        + WAIVER
    )
    contract = parse_contract(text, "here")
    record = replace(judge(subject=f"{HERE}:triple"), claim="claim")
    found = ladder.waive(contract, record, datetime.date.fromisoformat(day))
    assert found.verdict == word
    assert "me" in found.detail
    assert ladder.contract_verdict(contract, [found]) == word
    kept = replace(record, verdict="kept")
    assert ladder.waive(contract, kept) == kept


def test_l3_draws_ten_thousand_and_finds_what_fixed_inputs_miss():
    record = judge(level="L3")
    assert (record.verdict, record.level) == ("kept", 3)
    assert record.inputs >= 10_000
    record = judge(level="L3", subject=f"{HERE}:wrong_on_wide_batches")
    assert (record.verdict, record.at) == ("broken", 3)
    assert (
        record.differing == 257 * 8
    )  # what differs where it was found, not the 0 of the fixed inputs
    assert record.compared > record.differing
    assert '"rows":257' in record.replay  # the smallest of the ladder of row counts that breaks it


def wrong_on_wide_batches(x):
    return 2 * x if len(x) < 200 else 3 * x


def test_a_level_that_was_not_reached_is_not_kept():
    words = {"subject": f"{HERE}:double", "rows": 4, "sabotage": f'"{HERE}:triple"'}
    contract = parse_contract(
        TEXT.format(relation=predicate("is_double"), level="L3", **words), "here"
    )
    (record,) = verify_contract(contract, Options(trusted=TRUST, level=2))
    assert (record.verdict, record.level, record.required) == ("kept", 2, 3)
    assert ladder.contract_verdict(contract, [record]) == "below-level"
    assert ladder.contract_verdict(contract, []) == "not-judged"


def test_a_deadline_is_said():
    contract = parse_contract(
        TEXT.format(
            relation=predicate("is_double"),
            level="L2",
            subject=f"{HERE}:double",
            rows=4,
            sabotage="",
        ),
        "here",
    )
    (record,) = verify_contract(contract, Options(trusted=TRUST), deadline=0.0)
    assert record.verdict == "could-not-run"
    assert "--seconds" in record.detail


def test_worst_verdict_wins():
    assert ladder.worst([]) == "vacuous"
    assert ladder.worst(["kept", "waived"]) == "waived"
    assert ladder.worst(["kept", "void", "could-not-run"]) == "void"


def test_unknown_sabotage_is_named():
    record = judge(sabotage='"order by bach"')
    assert record.verdict == "could-not-run"
    assert "order by batch" in record.detail


def test_wrong_recipes_are_refused():
    from isobit.contracts.judge.recipes import Recipe

    for text in ("", "{}", "[]", '{"inputs":"rows","dtype":"float99","sizes":{},"values":"wide"}'):
        with pytest.raises(ContractError):
            Recipe.parse(text, {})


def test_memory_is_poisoned_here():
    assert torch.empty(8).isnan().all()
