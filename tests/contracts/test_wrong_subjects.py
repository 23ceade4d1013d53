"""Theorem: subjects that are wrong in sly ways are caught: shared buffers, inputs written to, caches, far leaks.

Each once passed a version of the judge.
"""

import json
import shlex

import pytest
import torch

from isobit.cli import main
from isobit.contracts.judge.trusted_code import resolve
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.options import Options
from isobit.errors import ContractError

HERE = "tests.contracts.test_wrong_subjects"
TEXT = """
id: sly-v1
version: 1.0.0
title: A contract for sly subjects
subject: {here}:{subject}
obligations: [{{id: O-1, text: it holds}}]
inputs:
  one: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [20, 65], n: [8]}}, rows: rows}}
  two: {{arguments: {{x: [rows, n], w: [n, n]}}, sizes: {{rows: [20, 65], n: [8]}}, rows: rows}}
claims: [{{id: c, obligations: [O-1], level: L2, {claim}}}]
"""
STATE = {}


def one_buffer(x):
    out = STATE.setdefault(tuple(x.shape), torch.empty_like(x))
    return out.copy_(x * torch.rand(()))


def writes_large_batches(x):
    return x.add_(torch.rand(())) if len(x) > 40 else x + 0


def packs_weights_once(x, w):
    return x @ STATE.setdefault((w.data_ptr(), tuple(w.shape)), w.clone())


def leaks_from_two_before(x):
    return x + 1e-3 * (x.roll(2, 0)[:, :1] > 0) * (torch.arange(len(x)) > 1)[:, None]


def minds_mixed_storage(x, w):
    return (x @ w) * (1 if x.is_contiguous() == w.is_contiguous() else 1.001)


def sorts(x):
    return x.sort(-1).values


def narrows(x):
    return x.bfloat16()


def exits(x):
    raise SystemExit(0)


def asserts(x):
    assert len(x) < 40
    return x + 0


def doubles(x):
    return 2 * x


def same(x):
    return x + 0


def compares_nothing(subject, case, tally):
    pass


def never_false(subject, n):
    return subject(n) or True


def raises(x, y, z):
    raise NameError


SLY = {
    "one_buffer": "relation: invariant, under: [neighbours, threads], inputs: one",
    "writes_large_batches": "relation: invariant, under: [threads], inputs: one",
    "packs_weights_once": "relation: invariant, under: [cache], inputs: two",
    "leaks_from_two_before": "relation: invariant, under: [neighbours], inputs: one",
    "minds_mixed_storage": "relation: invariant, under: [layout], inputs: two",
    "sorts": "relation: monotone, argument: x, inputs: one",
    "narrows": f'relation: accurate, against: "{HERE}:same", limit: 1, unit: ulp, inputs: one',
    "exits": "relation: invariant, under: [threads], inputs: one",
    "asserts": "relation: invariant, under: [threads], inputs: one",
}


def judge(subject, claim):
    STATE.clear()
    contract = parse_contract(TEXT.format(here=HERE, subject=subject, claim=claim), "here")
    (record,) = verify_contract(contract, Options(trusted=("tests",)))
    return record


@pytest.mark.parametrize("subject", SLY)
def test_caught(subject):
    assert judge(subject, SLY[subject]).verdict == "broken"


def test_a_right_subject_is_kept():
    assert judge("same", SLY["one_buffer"]).verdict == "kept"


def test_a_transform_that_compares_nothing_is_vacuous():
    claim = f'relation: invariant, under: [threads, "{HERE}:compares_nothing"], inputs: one'
    assert judge("same", claim).verdict == "vacuous"


def test_a_planted_subject_that_raises_is_not_caught_by_algebra():
    claim = f'relation: algebra, predicate: "{HERE}:never_false", integers: {{n: [0, 9]}}, sabotage: ["{HERE}:raises"]'
    assert judge("same", claim).verdict == "void"


@pytest.mark.parametrize(
    "reference",
    [
        "isobit.contracts.judge.transforms:LAYOUTS.popitem",
        "isobit:import_module",
        "isobit.foundation.files:os",
    ],
)
def test_neither_tables_nor_foreign_code_are_reached_through_a_trusted_package(reference):
    with pytest.raises(ContractError):
        resolve(reference, ())


CODE = """
def right(x): return x + 0
def wrong(x): return x * (1 if len(x) < 9 else 1.001)
"""
FILE = """
id: {id}-v1
version: 1.0.0
title: t
subject: sly_code:{subject}
depends_on: [{rests}]
obligations: [{{id: O-1, text: it holds}}]
inputs: {{one: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [4, 20], n: [8]}}, rows: rows}}}}
claims: [{{id: c, obligations: [O-1], level: L2, relation: invariant, under: [batch], inputs: one}}]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "sly_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_rests_on_red_is_no_pass_anywhere(place, capsys):
    (place / "base.contract.yaml").write_text(FILE.format(id="base", subject="wrong", rests=""))
    (place / "top.contract.yaml").write_text(
        FILE.format(id="top", subject="right", rests="base-v1")
    )
    words = ["verify", "top-v1", "--trust", "sly_code", "--junit", "j.xml", "--json"]
    for level in ("L2", "L4"):
        assert main.main([*words, "--level", level]) == 2
        (status,) = json.loads(capsys.readouterr().out)["contracts"]
        assert status["weak"] == "base-v1"
        assert 'errors="1"' in (place / "j.xml").read_text()


def test_red_outlives_a_waiver_and_a_green_run(place, capsys):
    waiver = "waivers: [{claim: c, reason: 'x; it is kept: y', owner: me, expires: 2999-01-01}]\n"
    (place / "base.contract.yaml").write_text(
        FILE.format(id="base", subject="wrong", rests="") + waiver
    )
    for again in ([], ["--again"]):
        assert main.main(["verify", "--trust", "sly_code", *again]) == 1
        assert "WAIVED base-v1/c" in capsys.readouterr().out
    assert main.main(["contract", "status"]) == 1


def test_places_that_cannot_be_written_are_said(place, capsys):
    (place / "top.contract.yaml").write_text(FILE.format(id="top", subject="right", rests=""))
    assert main.main(["verify", "--trust", "sly_code", "--junit", "no/such/folder/j.xml"]) == 2
    assert "no/such/folder" in capsys.readouterr().err


def test_a_printed_replay_works_in_a_folder_without_contracts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["verify", "silu-kernel-v1", "--subject", "stock", "--level", "L2"]) == 1
    said = capsys.readouterr().out
    printed = next(
        line for line in said.splitlines() if "replay silu-kernel-v1/" in line and "--case" in line
    )
    assert main.main(shlex.split(printed)[1:]) == 1
    assert "differ" in capsys.readouterr().out
    assert main.main(["contract", "replay", "silu-kernel-v1/no-such-claim"]) == 2
    assert main.main(["contract", "replay", "no-such-v1/claim"]) == 2
    capsys.readouterr()
