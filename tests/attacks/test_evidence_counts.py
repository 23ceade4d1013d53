"""Theorem: evidence counts only for what was judged: this code, these files, this engine, these records, this key.

Each of these once let a contract pass that had not been judged as it stands.
"""

import importlib
import itertools
import json
import sys

import pytest
from blake3 import blake3

from isobit.cli import main
from isobit.contracts import sources
from isobit.contracts.evidence import Evidence, Finding
from isobit.contracts.workspace import Run, Workspace
from isobit.records import ClaimRecord, Planted

PLAIN = """
import os
HERE = os.path.dirname(__file__)
def right(x): return x + 0
def wrong(x): return x * (1 if len(x) < 9 else 1.001)
def by_table(x):
    with open(os.path.join(HERE, "table.txt")) as file:
        return x * float(file.read()) if len(x) > 9 else x
def by_absence(x):
    try:
        open(os.path.join(HERE, "override")).close()
    except FileNotFoundError:
        return x + 0
    return wrong(x)
def keeps_a_cache(x):
    with open(os.path.join(HERE, "cache.txt"), "a+") as file:
        file.write("called")
    return x + 0
"""
BY_NAME = """
import importlib, os
def by_name(x): return importlib.import_module("{name}_impl").f(x)
def by_builtin(x): return __import__("{name}_impl").f(x)
def by_text(x):
    found = {{}}
    with open(os.path.join(os.path.dirname(__file__), "impl.txt")) as file:
        exec(file.read(), found)
    return found["f"](x)
"""
CONTRACT = """
id: {name}-v1
version: 1.0.0
title: t
subject: {name}:{subject}
obligations: [{{id: O-1, text: it holds}}]
inputs: {{one: {{arguments: {{x: [rows, n]}}, sizes: {{rows: [4, 20], n: [8]}}, rows: rows}}}}
claims: [{{id: c, obligations: [O-1], level: {level}, relation: invariant, under: [batch], inputs: one}}]
"""
PLANTED = ("order by batch", "last row off by one ulp", "order by batch with gradients")
_numbers = itertools.count()


class Place:
    """A folder with a module, a contract for one of its functions, and what they read."""

    def __init__(self, path, subject, level="L2"):
        self.path, self.name = path, f"judged{next(_numbers)}"
        code = BY_NAME.format(name=self.name) if f"def {subject}(" in BY_NAME else PLAIN
        (path / f"{self.name}.py").write_text(code)
        (path / f"{self.name}_impl.py").write_text("def f(x): return x + 0\n")
        (path / "impl.txt").write_text("def f(x): return x + 0\n")
        (path / "table.txt").write_text("1.0")
        self.contract = path / "c.contract.yaml"
        self.contract.write_text(CONTRACT.format(name=self.name, subject=subject, level=level))

    def verify(self, *words):
        return main.main(["verify", "--trust", self.name, *words])

    def restart(self):
        """As a new process would import."""
        for name in [name for name in sys.modules if name.startswith(self.name)]:
            del sys.modules[name]
        for cached in (sources.find_file, sources.find_package, sources.worked_on, importlib):
            getattr(cached, "cache_clear", importlib.invalidate_caches)()

    def evidence(self):
        return sorted(self.path.glob(".isobit/evidence/*/*.jsonl"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *given: Place(tmp_path, *given)


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
    assert main.main(["status"]) == 0
    assert here.verify() == 0
    assert "0 judged now" in capsys.readouterr().out
    file = here.path / REACHED[subject].format(name=here.name)
    file.write_text("1.001" if subject == "by_table" else WRONG)
    here.restart()
    assert main.main(["status"]) == 2
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
    assert main.main(["status"]) == 2
    capsys.readouterr()


def test_a_file_that_the_code_writes_is_its_output(place, capsys):
    here = place("keeps_a_cache")
    assert here.verify() == 0
    assert main.main(["status"]) == 0
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
    assert main.main(["status"]) == 0
    (there / "table.txt").write_text("2.0")
    assert main.main(["status"]) == 2
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
def test_evidence_of_one_engine_does_not_count_for_another(place, variable, value, monkeypatch, capsys):
    monkeypatch.delenv(variable, raising=False)
    here = place("right")
    assert here.verify() == 0
    monkeypatch.setenv(variable, value)
    assert main.main(["status", "--json"]) == 2
    out = capsys.readouterr().out
    (status,) = json.loads(out[out.index("[\n") :])
    assert (status["verdict"], status["detail"]) == ("not-judged", f"evidence exists without {variable}={value}")
    assert here.verify() == 0
    assert "1 judged now" in capsys.readouterr().out
    monkeypatch.delenv(variable)
    assert main.main(["status"]) == 0
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
    for words in (["status"], ["explain", f"{here.name}-v1"]):
        main.main(words)
        assert "evidence exists under TRITON_INTERPRET=1" in " ".join(capsys.readouterr().out.replace("│", " ").split())


# ---- forgeries and signatures ----------------------------------------------------------------------------


def keys(folder, name):
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    plain = forms.NoEncryption()
    if name == "ssh":
        secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, plain)
        public = private.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    else:
        secret = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, plain)
        public = private.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    (folder / name).write_bytes(secret)
    (folder / f"{name}.pub").write_bytes(public)
    return str(folder / name), str(folder / f"{name}.pub")


def forged(here) -> None:
    """A file that is well-formed in every respect, for a subject that nobody has judged."""
    workspace = Workspace([here.path])
    (entry,) = workspace.choose([])
    planted = tuple(Planted(f"{name}, under batch", True, "") for name in PLANTED)
    record = ClaimRecord("c", "invariant", "kept", 2, 2, 2, 24, 192, planted=planted)
    Evidence(here.path / ".isobit").write(Finding(entry.id, workspace.tree.digest(entry.id), "", 2, (record,)))


@pytest.mark.parametrize("form", ["ssh", "pem"])
def test_only_what_the_key_signed_counts_where_a_signature_is_required(place, tmp_path, form, capsys):
    secret, public = keys(tmp_path, form)
    here = place("wrong")
    forged(here)
    # The limit that signatures are for: whoever can write to the folder can write evidence.
    assert main.main(["status"]) == 0
    assert main.main(["status", "--require-signature", public]) == 2
    said = capsys.readouterr().out
    assert f"it is not signed by the required key: \n{here.evidence()[0].relative_to(tmp_path)}" in said
    assert here.verify("--sign", secret) == 1  # judged, not believed
    assert main.main(["status", "--require-signature", public]) == 1
    capsys.readouterr()


def test_signed_evidence_counts_and_signing_again_judges_nothing(place, tmp_path, capsys):
    secret, public = keys(tmp_path, "pem")
    _, other = keys(tmp_path, "other")
    here = place("right")
    assert here.verify() == 0
    assert main.main(["status", "--require-signature", public]) == 2
    assert here.verify("--sign", secret) == 0
    assert "1 judged now" in capsys.readouterr().out.splitlines()[-1]
    assert here.verify("--sign", secret) == 0
    assert "0 judged now" in capsys.readouterr().out
    assert main.main(["status", "--require-signature", public]) == 0
    assert main.main(["status", "--require-signature", other]) == 2
    assert main.main(["status", "--require-signature", other, "--require-signature", public]) == 0
    capsys.readouterr()


def test_a_signature_of_one_file_is_none_of_another(place, tmp_path, capsys):
    secret, public = keys(tmp_path, "pem")
    here = place("right")
    assert here.verify("--sign", secret) == 0
    (signature,) = tmp_path.glob(".isobit/evidence/*/*.sig")
    (signed,) = here.evidence()
    forged(here)
    (false,) = [file for file in here.evidence() if file != signed]
    signed.unlink()
    signature.rename(false.with_name(signature.name.replace(signed.name, false.name)))
    for text in (None, "", "00" * 64, "zz", "\xff" * 500):
        if text is not None:
            next(tmp_path.glob(".isobit/evidence/*/*.sig")).write_text(text)
        assert main.main(["status", "--require-signature", public]) == 2
        reason = "it is not signed by the required key" if text == "\xff" * 500 else "its signature is false"
        assert reason in capsys.readouterr().out


def test_a_cache_that_came_with_evidence_is_not_believed_where_a_signature_is_required(place, tmp_path, capsys):
    here = place("right")
    text = CONTRACT.format(name=here.name, subject="right", level="L2").replace("claims:", "claims:\n  # more\n ")
    more = "\n - {id: d, obligations: [O-1], level: L2, relation: invariant, under: [threads], inputs: one}"
    here.contract.write_text(text.replace("[{id: c", "\n - {id: c").replace("inputs: one}]", "inputs: one}" + more))
    Workspace([tmp_path])  # caches the facts of the new text
    facts = tmp_path / ".isobit" / "facts.json"
    cached = json.loads(facts.read_text())
    digest = blake3(here.contract.read_bytes()).hexdigest()[:32]
    assert [rung[0] for rung in cached["facts"][digest]["rungs"]] == ["c", "d"]
    cached["facts"][digest]["rungs"].pop()
    cached["facts"][digest]["claims"] = 1
    facts.write_text(json.dumps(cached))
    assert len(Workspace([tmp_path]).choose([])[0].rungs) == 1
    workspace = Workspace([tmp_path])
    workspace.require([])
    assert len(workspace.choose([])[0].rungs) == 2
    capsys.readouterr()


def test_keys_that_are_none_are_named(place, tmp_path, capsys):
    place("right")
    (tmp_path / "text").write_text("no key")
    for words in (
        ["status", "--require-signature", "text"],
        ["verify", "--sign", "text"],
        ["verify", "--sign", "gone"],
    ):
        assert main.main(words) == 2
        said = capsys.readouterr().err
        assert "Ed25519" in said
        assert "ssh-keygen" in said


@pytest.mark.parametrize("text", ["", "[]", '{"form": 5}', "\x00", "[" * 100_000])
def test_a_spoilt_cache_is_read_anew(place, tmp_path, text, capsys):
    place("right")
    (tmp_path / ".isobit").mkdir()
    (tmp_path / ".isobit" / "facts.json").write_text(text)
    assert main.main(["status"]) == 2
    capsys.readouterr()


def test_cached_facts_of_other_types_are_read_anew(place, tmp_path):
    place("right")
    Workspace([tmp_path])
    facts = tmp_path / ".isobit" / "facts.json"
    cached = json.loads(facts.read_text())
    for odd in (5, [], {}, {"id": 5}, {"rungs": [[]]}, {"rungs": 5}, {"claims": "9"}, {"promised": [5]}):
        known = {
            digest: {**found, **odd} if isinstance(odd, dict) and odd else odd
            for digest, found in cached["facts"].items()
        }
        facts.write_text(json.dumps({**cached, "facts": known}))
        workspace = Workspace([tmp_path])
        assert [workspace.status(entry).verdict for entry in workspace.choose([])] == ["not-judged"]


# ---- words -----------------------------------------------------------------------------------------------


def test_never_judged_and_judged_less_far_are_other_words_than_could_not_run(place, capsys):
    here = place("right", "L3")
    assert main.main(["status"]) == 2
    assert "1 contracts: 1 not-judged" in capsys.readouterr().out
    assert here.verify("--level", "L2") == 0
    assert main.main(["status"]) == 2
    said = capsys.readouterr().out
    assert "1 contracts: 1 below-level" in said
    assert "kept as far as L2, must reach L3" in said
    assert here.verify() == 0
    assert main.main(["status"]) == 0
    capsys.readouterr()


def test_untrusted_code_could_not_run(place, capsys):
    place("right")
    assert main.main(["verify"]) == 2
    assert main.main(["status"]) == 2
    assert "1 contracts: 1 could-not-run" in capsys.readouterr().out


def test_what_rests_on_something_that_was_not_judged_says_so(place, tmp_path, capsys):
    here = place("right")
    above = here.contract.read_text().replace(f"id: {here.name}-v1", f"id: above-v1\ndepends_on: [{here.name}-v1]")
    (tmp_path / "above.contract.yaml").write_text(above)
    workspace = Workspace([tmp_path])
    stands = {status.id: status for status in workspace.statuses(workspace.choose([]))}
    assert stands["above-v1"].verdict == "not-judged"
    for _ in workspace.judge([workspace.tree.find("above-v1")], Run((here.name,), 2)):
        pass
    stands = {status.id: status for status in workspace.statuses(workspace.choose([]))}
    assert (stands["above-v1"].verdict, stands["above-v1"].weak) == ("not-judged", f"{here.name}-v1")
    capsys.readouterr()
