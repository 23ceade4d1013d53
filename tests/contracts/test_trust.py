"""Nothing outside the trusted packages is imported, whichever key of a contract names it; private names never are."""

import sys

import pytest

from isobit.contracts.judge.trusted_code import FORBIDDEN, check_trusted, resolve
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.language.schema import Contract
from isobit.contracts.options import Options
from isobit.contracts.store.sources import find_file
from isobit.errors import ContractError

TRAP = "trust_trap_package"
SUBJECT = "trust_good_package"
GOOD = """
import torch
from isobit.foundation.records import Proof
def subject(x): return x * 0.5
def exact(x): return x * 0.5
def other(x): return x * 0.5
def wrong(x): return x + 3
def calls(): yield "none", (), {}
def holds(subject, case, tally): tally.same(subject(**case.arguments), case.arguments["x"] * 0.5, "half")
def refuse(): raise ValueError("no")
def wrong_refuse(): return None
def prove(subject): return Proof("interval", "all", 1, "" if float(subject(torch.ones(1))) == 0.5 else "not half")
def transform(subject, case, tally): tally.same(subject(**case.arguments), case.arguments["x"] * 0.5, "own transform")
def back(y): return y * 2
def algebra(subject, n): return n >= 0
class Deep:
    class Inner:
        def _hidden(x): return x
"""
TEMPLATE = """id: trust-v1
version: 1.0.0
title: t
subject: {subject}
obligations: [{{id: O-1, text: t}}]
inputs:
  few: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [3], n: [5]}}, rows: rows}}
claims:
  - {{id: c, obligations: [O-1], level: {level}, inputs: few, {claim}}}
"""


@pytest.mark.parametrize(
    "name",
    [
        "cli.main:main",
        "contracts.judge.trusted_code:resolve",
        "foundation.files:write_text",
        "simulator:World",
        "simulator.script:Script",
        "foundation.trusted_folder:serve_folder",
    ],
)
def test_contracts_may_not_name_code_that_acts_on_the_machine(name):
    with pytest.raises(ContractError, match="may not name"):
        resolve(f"isobit.{name}", ())


@pytest.mark.parametrize("name", FORBIDDEN)
def test_modules_that_contracts_may_not_name_exist(name):
    """A forbidden module that is moved must not become one that can be named."""
    assert find_file(f"isobit.{name}") is not None


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A package to trust, and one that leaves a file behind when it is imported."""
    (tmp_path / f"{SUBJECT}.py").write_text(GOOD)
    trap = tmp_path / TRAP
    trap.mkdir()
    for name in ("__init__.py", "inner.py"):
        (trap / name).write_text(f"open(__file__ + '.was_here', 'w').close()\n{GOOD}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield trap
    for name in [n for n in sys.modules if n.partition(".")[0] in (TRAP, SUBJECT)]:
        del sys.modules[name]


def sprung(trap) -> bool:
    return bool(list(trap.glob("*.was_here"))) or any(
        n.partition(".")[0] == TRAP for n in sys.modules
    )


def contract(claim: str, level: str = "L2", subject: str = f"{SUBJECT}:subject") -> Contract:
    claim = claim.replace("GOOD", SUBJECT).replace("TRAP", TRAP)
    return parse_contract(TEMPLATE.format(claim=claim, level=level, subject=subject), "trust")


EXACT = 'relation: accurate, against: "GOOD:exact", limit: 0, unit: ulp'
PLANTED = 'sabotage: ["GOOD:wrong"]'
# Every place in a claim that may name code, once with the trap in it.
PLACES = {
    "against": ('relation: accurate, against: "TRAP:exact", limit: 0, unit: ulp', "L2"),
    "against of parity": (
        'relation: parity, against: "TRAP.inner:other", sabotage: ["GOOD:wrong"]',
        "L2",
    ),
    "sabotage": (f'{EXACT}, sabotage: ["TRAP:wrong"]', "L2"),
    "control": (f'{EXACT}, {PLANTED}, control: ["TRAP.inner:wrong"]', "L2"),
    "proof.by": (
        f'{EXACT}, {PLANTED}, proof: {{engine: interval, by: "TRAP:prove", planted: "GOOD:wrong"}}',
        "L4",
    ),
    "proof.planted": (
        f'{EXACT}, {PLANTED}, proof: {{engine: interval, by: "GOOD:prove", planted: "TRAP:wrong"}}',
        "L4",
    ),
    "predicate": (f'relation: holds, predicate: "TRAP.inner:holds", {PLANTED}', "L2"),
    "own transform": (f'relation: invariant, under: ["TRAP:transform"], {PLANTED}', "L2"),
    "inverse": (f'relation: roundtrip, inverse: "TRAP:back", {PLANTED}', "L2"),
    "calls": (
        'relation: refuses, error: "builtins:ValueError", calls: "TRAP:calls", sabotage: ["GOOD:wrong_refuse"]',
        "L2",
    ),
    "error": (
        'relation: refuses, error: "TRAP:ValueError", calls: "GOOD:calls", sabotage: ["GOOD:wrong_refuse"]',
        "L2",
    ),
    "predicate of algebra": (
        'relation: algebra, predicate: "TRAP:algebra", integers: {n: [0, 9]}, sabotage: ["GOOD:wrong"]',
        "L2",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_that_is_not_trusted_is_not_imported(packages, place):
    claim, level = PLACES[place]
    trusted = (SUBJECT, "builtins")
    (record,) = verify_contract(contract(claim, level), Options(trusted, claim_seconds=30.0))
    assert not sprung(packages)
    assert record.verdict == "could-not-run", record.detail
    assert f"--trust {TRAP}" in record.detail


def test_subjects_are_not_imported_unless_trusted(packages):
    judged = contract(EXACT.replace("GOOD", SUBJECT), subject=f"{TRAP}.inner:subject")
    (record,) = verify_contract(judged, Options((SUBJECT,)))
    (other,) = verify_contract(contract(EXACT), Options((SUBJECT,), subject=f"{TRAP}:subject"))
    assert not sprung(packages)
    for found in (record, other):
        assert found.verdict == "could-not-run"
        assert f"--trust {TRAP}" in found.detail


def test_the_trap_can_close(packages):
    claim, level = PLACES["against"]
    (record,) = verify_contract(contract(f"{claim}, {PLANTED}", level), Options((SUBJECT, TRAP)))
    assert record.verdict == "kept", record.detail
    assert sprung(packages)


@pytest.mark.parametrize(
    "name", [TRAP, f"{TRAP}.inner", "os", "builtins", "isobits", "isobit_evil", "", ".", "Isobit"]
)
def test_only_whole_package_names_are_trusted(packages, name):
    before = set(sys.modules)
    with pytest.raises(ContractError, match="trusted package"):
        resolve(f"{name}:anything", (SUBJECT,))
    with pytest.raises(ContractError):
        check_trusted(f"{name}:anything", ())
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "path",
    [
        "_private",
        "Deep._hidden",
        "Deep.Inner._hidden",
        "__builtins__",
        "subject.__globals__",
        "subject.__class__.__base__",
    ],
)
def test_private_names_are_refused(packages, path):
    with pytest.raises(ContractError, match="private"):
        resolve(f"{SUBJECT}:{path}", (SUBJECT,))
    with pytest.raises(ContractError, match="no leading underscore"):
        contract(EXACT.replace("exact", path))


@pytest.mark.parametrize(
    "reference",
    ["absent", "Deep.absent", "", ".", "Deep."],
    ids=["no such", "no such inside", "empty", "dot", "open end"],
)
def test_what_does_not_exist_is_refused(packages, reference):
    with pytest.raises(ContractError, match="an existing object"):
        resolve(f"{SUBJECT}:{reference}", (SUBJECT,))


@pytest.mark.parametrize(
    "module", ["isobit.no_such_module", "isobit.", "isobit..bits", "isobit.bits.x"]
)
def test_modules_that_do_not_exist_are_refused(module):
    with pytest.raises(ContractError, match="an existing object"):
        resolve(f"{module}:x", ())


def test_what_is_trusted_is_found(packages):
    assert resolve("isobit.contracts.language.schema:Contract", ()) is Contract
    assert resolve(f"{SUBJECT}:Deep.Inner", (SUBJECT,)).__name__ == "Inner"


@pytest.mark.parametrize(
    "reference", ["isobit.foundation.machine:os.system", "isobit.ops.dispatch:import_module"]
)
def test_other_packages_are_not_reached_through_trusted_ones(reference):
    with pytest.raises(ContractError):
        resolve(reference, ())


def test_a_module_that_fails_to_import_is_a_verdict(packages, tmp_path):
    (tmp_path / "trust_broken_module.py").write_text("raise RuntimeError('at import')")
    judged = contract(EXACT, subject="trust_broken_module:subject")
    (record,) = verify_contract(judged, Options((SUBJECT, "trust_broken_module")))
    assert record.verdict == "could-not-run"
