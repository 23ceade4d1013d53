"""Text of a contract, a script, a kernel or a file's name never acts on the terminal or the page that shows it.

Escape sequences can clear a screen, set a title or, in some terminals, run commands; bidi overrides show other code
than runs; markup of the console's own library would colour a verdict. In every command and every format.
"""

import json
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from isobit.cli.main import main
from isobit.contracts.pytest_items import ClaimItem, NotKept
from isobit.foundation.plain_text import one_line, plain, plain_json

EVIL = "\x1b[31mred\x1b[0m\x1b]0;pwned\x07\x1b[2J\x9b5m\x85\u202eevil\u2066\u200b\x7f\x08[bold]b[/nope][link=file:///x]"
SHOWN = "redevil[bold]b[/nope][link=file:///x]"
QUOTED = json.dumps(EVIL)  # as YAML writes it, too

CONTRACT = f"""
id: y-v1
version: 0.1.0
title: {QUOTED}
subject: evil_code:{{subject}}
references: [{QUOTED}]
equations: {{{{f: {{{{formula: {QUOTED}}}}}}}}}
obligations: [{{{{id: INV-001, text: {QUOTED}, equation: f}}}}]
inputs:
  rows: {{{{arguments: {{{{x: [rows, n]}}}}, sizes: {{{{rows: [65], n: [64, 200]}}}}, rows: rows}}}}
claims:
  - id: rows
    text: {QUOTED}
    obligations: [INV-001]
    relation: parity
    against: evil_code:right
    inputs: rows
    level: L2
"""
CODE = f"""
import isobit
EVIL = {EVIL!r}
def right(x):
    return x + 0
def wrong(x):
    return x + 1
def raises(x):
    raise RuntimeError(EVIL)
def total(x):
    raise RuntimeError(EVIL)
def shaped(k, m):
    calls = []
    def summed(x):
        calls.append(x)
        if m > 1 and len(calls) > 2:
            raise isobit.RevealError(expected=EVIL, received=EVIL, remedy=EVIL)
        return x.sum()
    return summed
"""
START = "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
SCRIPT = f"{START}EVIL = {EVIL!r}\nprint(EVIL)\ndist.barrier()\nprint(EVIL, file=sys.stderr)\n"
FAILS = SCRIPT + "if rank: raise RuntimeError(EVIL)\ndist.barrier()\n"


def acting(text):
    """Characters that do something instead of being shown."""
    return sorted(
        {
            hex(ord(c))
            for c in text
            if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")
        }
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "evil_code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("evil_code", None)


@pytest.fixture
def shown(capfd):
    """Run a command; its exit code and everything that it wrote to the terminal, which must not act."""

    def run(*words):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code
        said = "".join(capfd.readouterr())
        assert acting(said) == [], words
        return code, said

    return run


def test_commands_about_contracts(place, shown):
    (place / "y.contract.yaml").write_text(CONTRACT.format(subject="raises"))
    assert shown("contract", "lint")[0] == 0
    assert shown("contract", "status")[0] == 2
    code, said = shown("contract", "explain", "y-v1")
    assert (code, SHOWN in "".join(said.split())) == (0, True)  # markup is shown as it was written
    assert "RuntimeError: red" in " ".join(
        shown("verify", "--trust", "evil_code", "--level", "L2")[1].split()
    )
    assert shown("contract", "status")[0] in (1, 2)
    assert shown("contract", "explain", "y-v1")[0] == 0
    assert shown("contract", "replay", "y-v1/rows", "--trust", "evil_code")[0] in (1, 2)
    for format in ("text", "mermaid", "json", "svg"):
        code, said = shown("contract", "graph", "--format", format)
        assert (code, "y-v1" in said) == (0, True)


@pytest.mark.parametrize("subject", ["wrong", "raises"])
def test_reports(place, shown, subject):
    (place / "y.contract.yaml").write_text(CONTRACT.format(subject=subject))
    files = ("--html", "p.html", "--junit", "j.xml", "--sarif", "s.json")
    code, said = shown(
        "verify", "--trust", "evil_code", "--level", "L2", "--json", "--quiet", *files
    )
    assert code in (1, 2)
    assert json.loads(said)["contracts"][0]["title"] == EVIL  # for machines, nothing is lost
    for name in ("p.html", "j.xml", "s.json"):
        assert acting(Path(name).read_text()) == [], name
    ElementTree.parse("j.xml")
    assert acting(json.dumps(json.loads(Path("s.json").read_text()), ensure_ascii=False)) == []
    assert SHOWN in Path("p.html").read_text()


def test_files_that_are_no_contracts(place, shown):
    (place / "\x1b[31mname\u202e.contract.yaml").write_text(f"id: y-v1\n{QUOTED}: 1\n")
    (place / "other.contract.yaml").write_text(f"id: {QUOTED}\n")
    for words in (
        ["contract", "lint"],
        ["contract", "lint", "--json"],
        ["contract", "status"],
        ["verify"],
    ):
        assert shown(*words)[0] in (1, 2)
    for words in (
        ["contract", "explain", EVIL],
        ["contract", "replay", EVIL],
        ["verify", EVIL],
        ["verify", f"{EVIL}.yaml"],
        [EVIL],
    ):
        assert shown(*words)[0] == 2
    assert shown("doctor", EVIL)[0] == 2
    assert shown("contract", "new", "made-v1", "--from", f"evil_code:{EVIL}")[0] == 2


def test_a_script_that_is_simulated(place, shown):
    Path("prints.py").write_text(SCRIPT)
    code, said = shown("simulate", "prints.py", "--ranks", "2", "--seeds", "1")
    assert (code, SHOWN in said) == (0, True)
    assert shown("simulate", "prints.py", "--ranks", "2", "--seeds", "1", "--json")[0] == 0
    Path("fails.py").write_text(FAILS)
    code, said = shown("simulate", "fails.py", "--ranks", "2", "--seeds", "1")
    assert (code, SHOWN in "".join(said.split())) == (1, True)
    assert shown("simulate", "fails.py", "--ranks", "2", "--seeds", "1", "--json")[0] == 1
    Path("stops.py").write_text(f"raise SystemExit({EVIL!r})")
    assert shown("simulate", "stops.py", "--seeds", "1")[0] in (1, 2)


def test_a_kernel_that_is_revealed(place, shown):
    files = ("--html", "o.html", "--svg", "o.svg")
    assert shown("reveal", "evil_code:shaped", "--k", "8", "--m", "1,2", *files)[0] == 2
    assert shown("reveal", "evil_code:total", "--k", "8")[0] == 2
    assert shown("reveal", "evil_code:total", "--k", "8", "--json")[0] == 2
    assert shown("reveal", f"evil_code:{EVIL}", "--k", "8")[0] == 2
    assert acting(Path("o.svg").read_text()) == []
    page = Path("o.html").read_text()
    assert acting(page) == []
    assert SHOWN in page


def test_plain_text():
    assert plain(EVIL) == SHOWN
    assert plain("a\r\nb\rc\u2028d\te") == "a\nb\nc\nd\te"
    assert plain("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \x1bPq#0\x1b\\ \x1bcx") == "link  x"
    assert plain("\x1b]0;never ended") == "0;never ended"
    assert plain("é ∑ 日本 – 😀") == "é ∑ 日本 – 😀"
    assert plain("\ud800\uffff\ufeffx") == "x"
    assert one_line("kept\n\x1b[1A  broken") == "kept broken"
    assert json.loads(plain_json(json.dumps([EVIL], ensure_ascii=False))) == [EVIL]
    assert (
        acting(plain_json(json.dumps([EVIL, "\ud800", "\U000e0041"], ensure_ascii=False, indent=1)))
        == []
    )


def test_the_pytest_plugin():
    item = ClaimItem.__new__(ClaimItem)  # without a session of pytest
    item.problem = f"expected {EVIL}"
    with pytest.raises(NotKept) as failed:
        item.runtest()
    assert str(failed.value) == f"expected {SHOWN}"
