"""Theorem: `certified` takes a Triton kernel to L4 without a GPU, and goes red for a kernel chosen by rows."""

import pytest

from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import load_contract
from isobit.contracts.options import Options
from isobit.contracts.store.sources import ROOT, Sources
from isobit.contracts.store.tree import JUDGE
from isobit.errors import ContractError

HERE = "tests.certifying.certify_subjects"
CONTRACT = """id: row-norm-v1
version: 1.0.0
title: A row norm in Triton that does not depend on the batch
subject: {subject}
obligations: [{{id: ROW-1, text: "A row's bits do not depend on how many rows there are"}}]
claims:
  - id: rows
    obligations: [ROW-1]
    relation: certified
    rows: [1, 3, 5]
    targets: [sm_80]
    level: {level}
    sabotage: ["one more product elsewhere", "{here}:warps_by_rows"]
    proof: {{engine: compiled, planted: "{here}:warps_by_rows"}}
"""


def contract(tmp_path, subject="norm", level="L4", **changes):
    text = CONTRACT.format(subject=f"{HERE}:{subject}", level=level, here=HERE)
    for old, new in changes.items():
        text = text.replace(old, new)
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    return load_contract(path)


def judge(found):
    (record,) = verify_contract(found, Options(trusted=("tests",)))
    return record


def test_a_triton_kernel_reaches_l4_without_a_gpu(tmp_path):
    record = judge(contract(tmp_path))
    assert (record.verdict, record.level) == ("kept", 4), record.detail
    assert record.compared == (1 + 3 + 5) * 64
    assert [planted.caught for planted in record.planted] == [True, True, True]
    assert record.proof.engine == "names of compiled code"
    assert "1, 3, 5 rows" in record.proof.covers


def test_a_kernel_chosen_by_rows_is_broken(tmp_path):
    record = judge(contract(tmp_path, subject="warps_by_rows"))
    assert (record.verdict, record.at) == ("broken", 2)
    assert "2 expressions" in record.detail


def test_what_cannot_be_executed_is_not_kept(tmp_path):
    record = judge(contract(tmp_path, subject="data_branch"))
    assert record.verdict == "could-not-run"
    assert "branch" in record.detail


@pytest.mark.parametrize(
    ("old", "new"),
    [("level: L4", "level: L3"), ("rows: [1, 3, 5]\n    ", ""), ("certified", "holds")],
)
def test_claims_that_say_nothing_are_refused(tmp_path, old, new):
    with pytest.raises(ContractError):
        contract(tmp_path, **{old: new})


def test_only_evidence_of_certified_claims_depends_on_the_compiled_code(tmp_path):
    sources = Sources()

    def covered(found):
        files = set().union(*(sources.files_of(each) for each in (*found.code(), JUDGE)))
        return {path.name for path in files if "certifying" in path.parts}

    assert {"api.py", "judging.py"} <= covered(contract(tmp_path))
    plain = load_contract(ROOT / "library" / "softmax.contract.yaml")
    assert plain.code()
    assert not covered(plain)
