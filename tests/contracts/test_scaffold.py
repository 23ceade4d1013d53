"""A contract to start from: it loads, names what the source says, and cannot pass before its reference is written."""

import inspect
import subprocess
import sys
from dataclasses import replace

import pytest

from isobit.cli import main
from isobit.contracts.authoring.lint import lint_contract
from isobit.contracts.authoring.scaffold import scaffold
from isobit.contracts.judge.verify import verify_contract
from isobit.contracts.language.load import parse_contract
from isobit.contracts.options import Options
from isobit.contracts.store import sources
from isobit.contracts.store.ladder import contract_verdict
from isobit.errors import ContractError

SOURCE = '''
raise RuntimeError("imported")

def norm(x: "torch.Tensor", weight: Tensor | None = None, *, eps: float = 1e-6, groups: int, mode="a\\nb"):
    """Norms "rows": it's {braces} # and hashes: yes.

    More.
    """

def bare(x, null, dim=-1): ...
def integers(k: int): ...
def positional(x, /): ...

class Holder:
    def method(self, x): ...
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "drafted"
    folder.mkdir()
    (folder / "ops.py").write_text(SOURCE)
    (folder / "__init__.py").write_text(
        "from .ops import norm as renamed\nfrom drafted import loop\n"
    )
    (folder / "loop.py").write_text("from drafted.loop import around\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    sources.find_file.cache_clear()
    yield "drafted"
    sources.find_file.cache_clear()


def test_the_source_is_read_and_not_imported(package):
    text = scaffold("my-norm-v1", "drafted.ops:norm")
    contract = parse_contract(text, "x")
    plain = contract.inputs["plain"]
    assert contract.title == 'Norms "rows": it\'s {braces} # and hashes: yes.'
    assert plain.arguments == {"x": ("rows", "k"), "weight": ("k",)}
    assert plain.options == {"groups": None}
    assert "left at their defaults: eps=1e-06, mode='a\\nb'" in text
    assert contract.claims[0].params["under"] == (
        "batch",
        "position",
        "neighbours",
        "layout",
        "threads",
    )
    assert contract.claims[1].params["against"] == "drafted.ops:reference_of_norm"
    (problem,) = lint_contract(contract, "x")
    assert "reference_of_" in problem.expected  # all that is left is to write it
    assert "drafted" not in sys.modules


def test_names_are_followed_to_where_they_are_defined(package):
    contract = parse_contract(scaffold("a", "drafted:renamed"), "x")
    assert contract.subject == "drafted:renamed"
    assert list(contract.inputs["plain"].arguments) == ["x", "weight"]
    assert list(
        parse_contract(scaffold("a", "drafted.ops:Holder.method"), "x").inputs["plain"].arguments
    ) == ["x"]


def test_without_annotations_what_must_be_given_is_a_tensor(package):
    assert list(
        parse_contract(scaffold("a", "drafted.ops:bare"), "x").inputs["plain"].arguments
    ) == ["x", "null"]


@pytest.mark.parametrize(
    "reference", ["isobit:linear", "isobit:softmax", "torch.nn.functional:layer_norm"]
)
def test_it_cannot_pass(reference):
    contract = parse_contract(scaffold("my-v1", reference), "x")
    (problem,) = lint_contract(contract, "x")
    assert "reference_of_" in problem.expected  # all that is left is to write it
    records = {r.claim: r for r in verify_contract(contract, Options(trusted=("torch",), level=1))}
    assert records["accuracy"].verdict == "could-not-run"
    assert "reference_of_" in records["accuracy"].detail
    # Whatever the other claim comes to.
    rows = replace(records["rows"], verdict="kept", level=4)
    assert contract_verdict(contract, [rows, records["accuracy"]]) == "could-not-run"


@pytest.mark.parametrize(
    ("name", "reference", "why"),
    [
        ("1 bad\nname", "isobit:linear", "a name of letters"),
        ("a", "no-colon", "package:function"),
        ("a", "drafted.ops:_private", "package:function"),
        ("a", "drafted.absent:f", "no source of drafted.absent"),
        ("a", "drafted.ops:absent", "no def of absent"),
        ("a", "drafted.loop:around", "no def of around"),
        ("a", "drafted.ops:integers", "a tensor among the parameters"),
        ("a", "drafted.ops:positional", "passed by name"),
        ("a", "torch.nn.functional:linear", "written in Python"),
    ],
)
def test_what_cannot_be_written_is_refused(package, name, reference, why):
    with pytest.raises(ContractError, match=f"(?s){why}"):
        scaffold(name, reference)


HALF = """
id: half-v1
version: 0.1.0
title: SiLU, "in quotes"
obligations:
  - {id: ONE, text: "Twice \\ x"}
inputs:
  rows: {arguments: {x: [rows, n]}, sizes: {rows: [3, 17], n: [4]}, rows: rows}
claims:
  - {id: rows, obligations: [ONE], relation: invariant, under: [batch], inputs: rows, level: L2}
  - {id: exact, obligations: [ONE], relation: accurate, against: "isobit.library.stock:silu",
     limit: 1.0e-5, unit: abs, inputs: rows, level: L2, sabotage: [negated]}
"""
CALLS = {
    "any-silu-v1": "x",
    "any-rope-v1": "x, cos, sin",
    "any-embedding-v1": "ids, weight",
    "rmsnorm-kernel-v1": "x, weight",
}


@pytest.mark.parametrize("contract", CALLS)
def test_code_of_a_contract_has_its_parameters_and_raises(contract, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["contract", "new", "my_code", "--code", contract]) == 0
    space = {}
    exec((tmp_path / "my_code.py").read_text(), space)
    assert ", ".join(inspect.signature(space["my_code"]).parameters) == CALLS[contract]
    with pytest.raises(NotImplementedError, match="write it"):
        space["my_code"](*CALLS[contract].split(", "))
    compile((tmp_path / "test_my_code.py").read_text(), "tests", "exec")
    before = (tmp_path / "my_code.py").read_text()
    assert main.main(["contract", "new", "my_code", "--code", "any-gelu-v1"]) == 2  # not replaced
    assert (tmp_path / "my_code.py").read_text() == before


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("3x", "any-silu-v1", "a name of a Python module"),
        ("class", "any-silu-v1", "a name of a Python module"),
        ("../up", "any-silu-v1", "a name of a Python module"),
        ("x", "no-such-contract-v1", "the id of a known contract"),
        ("x", "absent.yaml", "no such file"),
    ],
)
def test_code_that_cannot_be_written_is_refused(name, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["contract", "new", name, "--code", code]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_tests_of_a_stub_fail_until_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.contract.yaml").write_text(HALF)
    assert main.main(["contract", "new", "half_it", "--code", "half.contract.yaml"]) == 0

    def outcome():
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_half_it.py"]
        done = subprocess.run(words, capture_output=True, text=True)
        return done.stdout.strip().splitlines()[-1], done.stdout

    assert outcome()[0].startswith("2 failed")
    stub = (tmp_path / "half_it.py").read_text()
    body = "    from isobit import silu\n\n    return silu(x)\n    raise NotImplementedError"
    written = stub.replace("    raise NotImplementedError", body)
    (tmp_path / "half_it.py").write_text(written)
    assert outcome()[0].startswith("2 passed"), outcome()[1]
    (tmp_path / "half_it.py").write_text(written.replace("silu(x)", "silu(x) + x.sum() / 1000"))
    assert outcome()[0].startswith("2 failed")
