"""Evidence in the wheel is shown for what it is, never counts on this machine, and is ignored for other code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from isobit.cli import main
from isobit.cli.contract.status import FEW
from isobit.contracts.options import Options
from isobit.contracts.store import shipped as store
from isobit.contracts.store.evidence import sign
from isobit.contracts.store.shipped import Origin, ShippedEvidence, export
from isobit.contracts.store.tree import library
from isobit.contracts.workspace import Workspace

ROOT = Path(__file__).parents[2]
ID = "rank-agreement-v1"  # half a second, and depends on no other contract
ORIGIN = Origin(
    cpu="Reference CPU", commit="abc1234", date="2026-01-01", torch="2.13.0", python="3"
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file as packaging/ship_evidence.py writes it, with one contract, and the contracts that it lacks."""
    folder = tmp_path_factory.mktemp("judged")
    workspace = Workspace([library()], folder / ".isobit")
    assert all(r.verdict == "kept" for _, r in workspace.judge(workspace.choose([ID]), Options()))
    missing = export(workspace.tree, workspace.evidence, ORIGIN, folder / "evidence.json")
    return folder / "evidence.json", missing


@pytest.fixture
def ship(exported, tmp_path, monkeypatch):
    """Return a function that ships a changed file, and a workspace that was never judged on this machine."""
    monkeypatch.chdir(tmp_path)

    def shipped_with(change=lambda record: None):
        record = json.loads(exported[0].read_text())
        change(record)
        path = tmp_path / "evidence.json"
        path.write_text(json.dumps(record))
        monkeypatch.setattr(ShippedEvidence.__init__, "__defaults__", (path,))
        return Workspace([library()], tmp_path / ".isobit")

    return shipped_with


@pytest.mark.parametrize("folder", [".", "src", "tests"])
def test_shown_in_every_folder_of_a_checkout(folder, exported, tmp_path, monkeypatch, capsys):
    """There the contract is found by a name that is relative to the folder."""
    monkeypatch.chdir(ROOT / folder)
    monkeypatch.setattr(ShippedEvidence.__init__, "__defaults__", (exported[0],))
    assert main.main(["contract", "status", ID, "--evidence", str(tmp_path)]) == 2
    assert "shipped evidence: 1 of 1 kept" in " ".join(capsys.readouterr().out.split())


def test_shown_alike_behind_a_symbolic_link(tmp_path):
    """The package may be installed in a folder that is reached by a link."""
    (tmp_path / "linked").symlink_to(ROOT / "src")
    shown = []
    for folder in (ROOT / "src", tmp_path / "linked"):
        code = f"import sys; sys.path.insert(0, {str(folder)!r}); from isobit.cli import main"
        code += "; sys.exit(main.main(sys.argv[1:]))"
        words = [sys.executable, "-c", code, "contract", "status", "matmul-kernel-v1"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
        shown.append((done.returncode, done.stdout))
    assert shown[0] == shown[1]
    assert "shipped evidence" in shown[0][1]


def test_shown_with_machine_and_commit(ship, capsys):
    ship()
    assert main.main(["contract", "status", ID]) == 2  # not judged on this machine
    shown = capsys.readouterr().out
    said = " ".join(shown.split())
    for words in (
        "shipped: kept",
        "judged on Reference CPU at abc1234",
        "1 contracts: 1 judged elsewhere only",
        "shipped evidence: 1 of 1 kept, judged on another machine; not judged on this machine",
    ):
        assert words in said
    assert main.main(["contract", "status", ID, "--json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)["contracts"]
    assert (found["verdict"], found["level"]) == ("not-judged", 0)
    assert (found["shipped"]["verdict"], found["shipped"]["commit"]) == ("kept", "abc1234")


def test_shipped_as_kept_is_no_row_among_what_is_not_kept(ship, capsys):
    """After an installation nothing was judged; the first impression must not be that nothing is kept."""
    ship()
    assert main.main(["contract", "status", "isobit"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert ID not in said  # a row of the table of what is not kept
    assert "1 judged elsewhere only" in said


def test_verify_judges_as_if_it_were_not_there(ship):
    workspace = ship()
    (entry,) = workspace.choose([ID])
    assert workspace.status(entry).shipped
    assert workspace.stale([entry], Options()) == [entry]
    assert not workspace.evidence.has(workspace.tree.digest(ID))


def test_evidence_of_this_machine_comes_first(ship):
    workspace = ship()
    (entry,) = workspace.choose([ID])
    assert list(workspace.judge([entry], Options()))
    status = workspace.status(entry)
    assert (status.verdict, status.shipped) == ("kept", None)


def test_another_subject_or_a_required_signature_has_none(ship):
    workspace = ship()
    (entry,) = workspace.choose([ID])
    assert workspace.status(entry, "isobit.bits:equal").shipped is None
    workspace.evidence.keys = (object(),)
    assert workspace.status(entry).shipped is None


def drop_a_line(record):
    del record["contracts"][ID]["lines"][-1]


def change_the_first_record(record):
    lines = record["contracts"][ID]["lines"]
    lines[1] = lines[1].replace('"compared": ', '"compared": 9')


def of_version_1(record):
    lines = record["contracts"][ID]["lines"]
    header = json.loads(lines[0]) | {"form": 2}
    del header["order"]
    lines[0] = json.dumps(header)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_version_1, "judged under version 1 of the order of addition, and this is version"),
        (lambda r: r["contracts"][ID].update(source="0" * 32), "code that it binds has changed"),
        (lambda r: r["contracts"][ID].update(kernels="0"), "kernels were built from other sources"),
        (lambda r: r["origin"].pop("commit"), "commit"),
        (drop_a_line, "fewer or more records"),
        (change_the_first_record, "its chain is broken"),
    ],
)
def test_stale_or_damaged_is_ignored_with_a_word(ship, capsys, change, reason):
    ship(change)
    assert main.main(["contract", "status", ID]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "shipped: kept" not in shown
    assert "shipped evidence is stale for 1, and ignored" in shown
    assert reason in shown


def test_the_rest_of_a_long_list_has_its_verdicts(ship, capsys):
    ship(lambda record: record["contracts"].clear())
    assert main.main(["contract", "status", "isobit"]) == 2
    shown = capsys.readouterr().out
    contracts = int(re.search(r"^(\d+) contracts: \d+ not-judged$", shown, re.MULTILINE).group(1))
    assert f"and more: {contracts - FEW} not-judged" in shown
    assert "not kept" not in shown


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"form": 9}', '{"form": 1}', "[" * 100_000])
def test_a_file_of_another_form_is_none(ship, tmp_path, text):
    workspace = ship()
    (tmp_path / "evidence.json").write_text(text)
    assert workspace.status(workspace.choose([ID])[0]).shipped is None


def test_changed_source_is_noticed(ship, monkeypatch):
    workspace = ship()
    before = workspace.shipped.source_digest(ID)
    changed = library() / "rank_agreement.contract.yaml"
    real = store.hash_of_file
    monkeypatch.setattr(store, "hash_of_file", lambda p: "0" if p == changed else real(p))
    after = ship().shipped.source_digest(ID)
    assert changed.exists()
    assert before != after


@pytest.fixture(scope="module")
def keys():
    """A key that signs, and another one."""
    return Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def signed_with(key):
    """Return a change of a record: the signature that a release makes."""

    def change(record):
        name = key.public_key().public_bytes_raw().hex()
        signature = sign(key, store.SHIPPED, store.contents(record))
        record["signature"] = {"key": name, "signature": signature}

    return change


def test_a_signature_is_shown_and_can_be_required(ship, keys, capsys):
    signer, other = keys
    workspace = ship(signed_with(signer))
    (entry,) = workspace.choose([ID])
    name = signer.public_key().public_bytes_raw().hex()
    assert workspace.status(entry).shipped.signed_by == name
    assert main.main(["contract", "status", ID]) == 2
    said = "".join(capsys.readouterr().out.split())
    assert f"signedbyEd25519key{name}" in said
    for key, shown in ((signer, True), (other, False)):
        workspace.require([key.public_key()])
        assert bool(workspace.status(entry).shipped) == shown


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["origin"].update(commit="fff0000"),  # something else was signed
        lambda r: r["signature"].update(signature="0" * 128),
        lambda r: r["signature"].update(signature=None),
        lambda r: r["signature"].update(key="00"),
        lambda r: r["signature"].update(key="0" * 64),
        lambda r: r.update(signature=[]),
        lambda r: r.update(signature=None),
    ],
)
def test_a_false_signature_is_not_shown(ship, keys, change):
    def forge(record):
        signed_with(keys[0])(record)
        change(record)

    workspace = ship(forge)
    (entry,) = workspace.choose([ID])
    assert workspace.status(entry).shipped is None
    assert ID in workspace.shipped.stale
    workspace.require([keys[0].public_key()])
    assert workspace.status(entry).shipped is None


def test_without_cryptography_a_signature_is_named_as_not_checked(ship, keys, monkeypatch):
    workspace = ship(signed_with(keys[0]))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    (entry,) = workspace.choose([ID])
    assert "not checked" in workspace.status(entry).shipped.signed_by


def test_export_signs_the_whole_file(ship, exported, keys, tmp_path):
    workspace = Workspace([library()], exported[0].parent / ".isobit")
    path = tmp_path / "signed.json"
    export(workspace.tree, workspace.evidence, ORIGIN, path, signer=keys[0])
    shipped = ShippedEvidence(workspace.tree, path)
    assert shipped.is_signed_by(keys[0].public_key())
    assert not shipped.is_signed_by(keys[1].public_key())


def test_export_names_what_was_not_judged(exported):
    assert ID not in exported[1]
    assert "matmul-kernel-v1" in exported[1]
    assert str(ROOT) not in exported[0].read_text()


def test_reading_it_needs_no_torch(ship):
    program = (
        "import sys\nfrom isobit.cli.main import main\ncode = main(['contract', 'status', 'isobit'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_shipped_file_is_of_this_code():
    words = [sys.executable, "packaging/ship_evidence.py", "--check"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run packaging/ship_evidence.py"
