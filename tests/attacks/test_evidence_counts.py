"""Theorem: evidence counts only for what was judged: this code, these files, this engine, these records, this key.

Each of these once let a contract pass that had not been judged as it stands.
"""

import importlib
import json

import pytest

from isobit.cli import main
from isobit.contracts.options import Options
from isobit.contracts.workspace import Workspace
from tests.attacks.judged_place import places


@pytest.fixture
def place(tmp_path, monkeypatch):
    return places(tmp_path, monkeypatch)


# ---- what the code reaches -------------------------------------------------------------------------------

REACHED = {
    "by_name": "{name}_impl.py",
    "by_builtin": "{name}_impl.py",
    "by_text": "impl.txt",
    "by_table": "table.txt",
    "by_absence": "override",
}
WRONG = "def f(x): return x * (1 if len(x) < 9 else 1.001)\n"


@pytest.mark.parametrize("subject", REACHED)
def test_evidence_ends_when_what_the_code_reached_changes(place, subject, capsys):
    here = place(subject)
    assert here.verify() == 0
    assert main.main(["contract", "status"]) == 0
    assert here.verify() == 0
    assert "0 judged now" in capsys.readouterr().out
    file = here.path / REACHED[subject].format(name=here.name)
    file.write_text("1.001" if subject == "by_table" else WRONG)
    here.restart()
    assert main.main(["contract", "status"]) == 2
    said = capsys.readouterr().out
    assert "not-judged" in said
    assert f"{file.name} changed since it was judged" in " ".join(said.replace("│", " ").split())
    assert here.verify() == 1
    assert "1 judged now" in capsys.readouterr().out


def test_code_that_another_contract_loaded_before_is_reached_too(place, capsys):
    """No event tells of a module that is loaded already."""
    here = place("by_name")
    importlib.import_module(f"{here.name}_impl")
    assert here.verify() == 0
    (here.path / f"{here.name}_impl.py").write_text(WRONG)
    assert main.main(["contract", "status"]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("subject", ["by_table_at_import", "by_table_once"])
def test_what_a_module_reads_once_is_reached_by_every_contract_that_binds_it(
    place, tmp_path, subject, capsys
):
    """Only the contract that is judged first sees the file opened."""
    here = place(subject)
    second = here.contract.read_text().replace(f"id: {here.name}-v1", "id: second-v1")
    (tmp_path / "second.contract.yaml").write_text(second)
    assert here.verify() == 0
    headers = [json.loads(file.read_text().splitlines()[0]) for file in here.evidence()]
    assert [sorted(header["reached"]) for header in headers] == [["table.txt"]] * 2
    (tmp_path / "table.txt").write_text("1.001")
    assert main.main(["contract", "status"]) == 2
    assert "2 contracts: 2 not-judged" in capsys.readouterr().out


def test_a_file_that_the_code_writes_is_its_output(place, capsys):
    here = place("keeps_a_cache")
    assert here.verify() == 0
    assert main.main(["contract", "status"]) == 0
    (header,) = [json.loads(file.read_text().splitlines()[0]) for file in here.evidence()]
    assert header["reached"] == {}
    capsys.readouterr()


def test_evidence_travels_with_the_files_that_it_names(place, tmp_path, monkeypatch, capsys):
    here = place("by_table")
    assert here.verify() == 0
    there = tmp_path.with_name(f"{tmp_path.name}-there")
    tmp_path.rename(there)
    monkeypatch.chdir(there)
    monkeypatch.syspath_prepend(str(there))
    here.restart()
    assert main.main(["contract", "status"]) == 0
    (there / "table.txt").write_text("2.0")
    assert main.main(["contract", "status"]) == 2
    capsys.readouterr()


def test_a_plain_contract_reaches_nothing_that_its_digest_does_not_cover(place, capsys):
    here = place("right")
    assert here.verify() == 0
    (header,) = [json.loads(file.read_text().splitlines()[0]) for file in here.evidence()]
    assert header["reached"] == {}
    capsys.readouterr()


# ---- engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ONEDNN_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "default"), ("TRITON_INTERPRET", "1")],
)
def test_evidence_of_one_engine_does_not_count_for_another(
    place, variable, value, monkeypatch, capsys
):
    monkeypatch.delenv(variable, raising=False)
    here = place("right")
    assert here.verify() == 0
    monkeypatch.setenv(variable, value)
    assert main.main(["contract", "status", "--json"]) == 2
    out = capsys.readouterr().out
    (status,) = json.loads(out[out.index("{\n") :])["contracts"]
    assert (status["verdict"], status["detail"]) == (
        "not-judged",
        f"evidence exists without {variable}={value}",
    )
    assert here.verify() == 0
    assert "1 judged now" in capsys.readouterr().out
    monkeypatch.delenv(variable)
    assert main.main(["contract", "status"]) == 0
    machines = {json.loads(file.read_text().splitlines()[0])["machine"] for file in here.evidence()}
    assert {f"{variable}={value}" in machine for machine in machines} == {True, False}
    engines = {json.loads(file.read_text().splitlines()[0])["engine"] for file in here.evidence()}
    assert all(engine.startswith(("bf16 amx, torch ", "bf16 chain, torch ")) for engine in engines)
    capsys.readouterr()


def test_evidence_made_in_the_interpreter_is_pointed_to(place, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    here = place("right")
    assert here.verify() == 0
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for words in (["contract", "status"], ["contract", "explain", f"{here.name}-v1"]):
        main.main(words)
        assert "evidence exists under TRITON_INTERPRET=1" in " ".join(
            capsys.readouterr().out.replace("│", " ").split()
        )


# ---- words -----------------------------------------------------------------------------------------------


def test_never_judged_and_judged_less_far_are_other_words_than_could_not_run(place, capsys):
    here = place("right", "L3")
    assert main.main(["contract", "status"]) == 2
    assert "1 contracts: 1 not-judged" in capsys.readouterr().out
    assert here.verify("--level", "L2") == 0
    assert main.main(["contract", "status"]) == 2
    said = capsys.readouterr().out
    assert "1 contracts: 1 below-level" in said
    assert "kept up to L2, must reach L3" in said
    assert here.verify() == 0
    assert main.main(["contract", "status"]) == 0
    capsys.readouterr()


def test_untrusted_code_could_not_run(place, capsys):
    place("right")
    assert main.main(["verify"]) == 2
    assert main.main(["contract", "status"]) == 2
    assert "1 contracts: 1 could-not-run" in capsys.readouterr().out


def test_what_rests_on_something_that_was_not_judged_says_so(place, tmp_path, capsys):
    here = place("right")
    above = here.contract.read_text().replace(
        f"id: {here.name}-v1", f"id: above-v1\ndepends_on: [{here.name}-v1]"
    )
    (tmp_path / "above.contract.yaml").write_text(above)
    workspace = Workspace([tmp_path])
    stands = {status.id: status for status in workspace.statuses(workspace.choose([]))}
    assert stands["above-v1"].verdict == "not-judged"
    for _ in workspace.judge([workspace.tree.find("above-v1")], Options((here.name,), 2)):
        pass
    stands = {status.id: status for status in workspace.statuses(workspace.choose([]))}
    assert (stands["above-v1"].verdict, stands["above-v1"].weak) == (
        "not-judged",
        f"{here.name}-v1",
    )
    capsys.readouterr()
