"""A digest changes with a text, its source and everything it depends on; then exactly the dependents are stale."""

import random
import statistics
import subprocess
import sys

import pytest

from isobit.contracts.options import Options
from isobit.contracts.store import tree as tree_module
from isobit.contracts.store.evidence import Evidence, Finding
from isobit.contracts.store.python_imports import imports_of
from isobit.contracts.store.sources import find_file
from isobit.contracts.store.tree import Tree, find_contracts
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from isobit.records import ClaimRecord, Planted

RUN = Options(level=2)


def text_of(id: str, depends_on=(), subject="json:f", title="t", claims=("c",)) -> str:
    rest = 'obligations: [O-1], relation: refuses, error: "json:E", calls: "json:c", level: L2'
    return f"""id: {id}
version: 1.0.0
title: {title}
subject: {subject}
depends_on: [{", ".join(depends_on)}]
obligations: [{{id: O-1, text: holds}}]
claims: [{", ".join(f"{{id: {claim}, {rest}}}" for claim in claims)}]
"""


def write(folder, id, **given):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{id}.contract.yaml").write_text(text_of(id, **given))


def digests(folder) -> dict[str, str]:
    tree = Tree([folder], folder / ".isobit")
    assert tree.broken == []
    return {id: tree.digest(id) for id in tree.chosen}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {id for id in before if before[id] != after[id]}


@pytest.fixture
def steady(monkeypatch):
    """Without the code that judges, which is part of every digest, and which someone may be editing."""
    monkeypatch.setattr(tree_module, "JUDGE", "json:judge")


# e depends on c and d, both on b, b on a; z on nothing.
DIAMOND = {"a": (), "b": ("a",), "c": ("b",), "d": ("b",), "e": ("c", "d"), "z": ()}
ABOVE = {"a": "abcde", "b": "bcde", "c": "ce", "d": "de", "e": "e", "z": "z"}


@pytest.fixture
def diamond(tmp_path, steady):
    for id, below in DIAMOND.items():
        write(tmp_path, id, depends_on=below)
    return tmp_path


@pytest.mark.parametrize("id", DIAMOND)
def test_a_change_of_text_changes_exactly_the_dependents(diamond, id):
    before = digests(diamond)
    assert len(set(before.values())) == len(DIAMOND)
    assert digests(diamond) == before
    write(diamond, id, depends_on=DIAMOND[id], title="other")
    assert changed(before, digests(diamond)) == set(ABOVE[id])


def test_another_subject_has_another_digest(diamond):
    tree = Tree([diamond], diamond / ".isobit")
    assert (
        len(
            {
                tree.digest("e"),
                tree.digest("e", "stock"),
                tree.digest("e", "torch:sum"),
                tree.digest("e", " thorough"),
            }
        )
        == 4
    )


@pytest.fixture
def sources(tmp_path, monkeypatch, steady):
    """Packages with and without __init__, and modules beside them, under names that no other test has."""
    name = f"src{random.SystemRandom().randrange(10**12)}"
    root = tmp_path / "code"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/kernel.py": "from . import parts\nfrom .deep import far\n",
        f"{name}/parts.py": f"def f():\n    import {name}_side\n",
        f"{name}/deep/__init__.py": "",
        f"{name}/deep/far.py": "import torch, os\n",
        f"{name}/unused.py": "",
        f"{name}_side.py": "",
        f"{name}_bare/inner/kernel.py": f"from {name}_bare.inner import parts\n",
        f"{name}_bare/inner/parts.py": "",
    }
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    monkeypatch.syspath_prepend(str(root))
    yield root, name
    assert not [module for module in sys.modules if module.startswith(name)]  # read, never imported


def test_a_change_of_bound_source_changes_exactly_those_that_bind_it(tmp_path, sources):
    root, name = sources
    folder = tmp_path / "contracts"
    write(folder, "kernel", subject=f"{name}.kernel:f")
    write(folder, "parts", subject=f"{name}.parts:f")
    write(folder, "bare", subject=f"{name}_bare.inner.kernel:f")
    write(folder, "top", depends_on=("parts",))
    write(folder, "other")
    before = digests(folder)
    effects = {
        f"{name}/kernel.py": {"kernel"},
        f"{name}/parts.py": {"kernel", "parts", "top"},
        f"{name}/deep/far.py": {"kernel"},
        f"{name}/__init__.py": {"kernel", "parts", "top"},
        f"{name}/unused.py": set(),
        f"{name}_side.py": {"kernel", "parts", "top"},
        f"{name}_bare/inner/kernel.py": {"bare"},
        f"{name}_bare/inner/parts.py": {"bare"},
    }
    for file, expected in effects.items():
        old = (root / file).read_text()
        (root / file).write_text(old + "# changed\n")
        assert changed(before, digests(folder)) == expected, file
        (root / file).write_text(old)
    assert digests(folder) == before


def test_a_change_of_the_code_that_judges_changes_all(tmp_path, sources, monkeypatch):
    root, name = sources
    monkeypatch.setattr(tree_module, "JUDGE", f"{name}.kernel:judge")
    for id in "ab":
        write(tmp_path / "contracts", id)
    before = digests(tmp_path / "contracts")
    (root / name / "deep" / "far.py").write_text("# changed")
    assert changed(before, digests(tmp_path / "contracts")) == {"a", "b"}


def test_imports_are_read_from_text():
    text = b"import a.b\nfrom .c import d\nfrom ..e import f\nfrom . import g\ndef x():\n    from h import i\n"
    found = imports_of(text, "p.q.r", False)
    assert {"a.b", "p.q.c", "p.q.c.d", "p.e", "p.e.f", "p.q.g", "h", "h.i"} <= found
    assert {"p.q.r.c", "p.q.e"} <= imports_of(text, "p.q.r", True)
    assert imports_of(b"def (", "p", False) == frozenset()
    assert find_file("no_such_module_at_all") is None


def test_circles_are_named(tmp_path):
    for id, below in {"a": "b", "b": "c", "c": "a", "d": "a"}.items():
        write(tmp_path, id, depends_on=(below,))
    tree = Tree([tmp_path], tmp_path / ".isobit")
    for id, circle in {"a": "a → b → c → a", "d": "a → b → c → a", "c": "c → a → b → c"}.items():
        with pytest.raises(ContractError, match=circle):
            tree.digest(id)
    workspace = Workspace([tmp_path])
    assert len(workspace.stale(workspace.choose([]), RUN)) == 4
    assert {workspace.status(e).verdict for e in workspace.choose([])} == {"could-not-run"}


def test_missing_dependencies_are_named_with_a_suggestion(tmp_path):
    write(tmp_path, "softmax-v1")
    write(tmp_path, "loss-v1", depends_on=("sofmax-v1",))
    with pytest.raises(ContractError, match="did you mean 'softmax-v1'"):
        Tree([tmp_path], tmp_path / ".isobit").digest("loss-v1")


def test_ids_are_unique_and_broken_files_are_named(tmp_path):
    write(tmp_path / "one", "a")
    write(tmp_path / "two", "a")
    (tmp_path / "contract.yaml").write_bytes(b"\xff")
    for hidden in (".hidden", "node_modules"):
        write(tmp_path / hidden, "unseen")
    tree = Tree([tmp_path], tmp_path / ".isobit")
    assert tree.chosen == ["a"]
    assert [broken.error.expected for broken in tree.broken] == [
        "UTF-8",
        "an id that no other contract has",
    ]
    assert len(list(find_contracts(tmp_path))) == 3


def test_facts_that_are_no_facts_are_read_anew(diamond):
    (diamond / ".isobit").mkdir()  # as evidence makes it; without it, no facts are kept
    before = digests(diamond)
    (diamond / ".isobit").mkdir(exist_ok=True)  # what only reads does not make the folder
    for text in ("", "[]", "{}", '{"form": 5}', "\x00"):
        (diamond / ".isobit" / "facts.json").write_text(text)
        assert digests(diamond) == before


def record_of(verdict: str = "kept", detail: str = "", claim: str = "c") -> ClaimRecord:
    planted = (Planted("accepts everything", True, "accepted"),)
    return ClaimRecord(
        claim, "refuses", verdict, 2, 2, 1, 1, 1, int(verdict != "kept"), detail, planted=planted
    )


def settle(workspace: Workspace, verdict: str = "kept") -> None:
    for entry in workspace.choose([]):
        digest = workspace.tree.digest(entry.id)
        workspace.evidence.write(Finding(entry.id, digest, "", 2, (record_of(verdict),)))


def stale(folder) -> list[str]:
    workspace = Workspace([folder])
    return [entry.id for entry in workspace.stale(workspace.choose([]), RUN)]


@pytest.mark.parametrize("verdict", ["kept", "broken"])
@pytest.mark.parametrize("id", DIAMOND)
def test_exactly_the_dependents_are_stale_after_a_change(diamond, id, verdict):
    assert stale(diamond) == [*"abcdez"]
    settle(Workspace([diamond]), verdict)
    assert stale(diamond) == []
    workspace = Workspace([diamond])
    assert {workspace.status(e).verdict for e in workspace.choose([])} == {verdict}
    write(diamond, id, depends_on=DIAMOND[id], title="other")
    assert stale(diamond) == [*ABOVE[id]]  # dependencies first
    workspace = Workspace([diamond])
    stands = {e.id: workspace.status(e).verdict for e in workspace.choose([])}
    assert {id for id, word in stands.items() if word == "not-judged"} == set(ABOVE[id])


def test_evidence_that_is_spoilt_settles_nothing(diamond):
    workspace = Workspace([diamond])
    settle(workspace)
    (spoilt,) = workspace.evidence.names()[workspace.tree.digest("c")]
    with open(spoilt, "a") as file:
        file.write(" ")
    assert stale(diamond) == ["c"]
    workspace = Workspace([diamond])
    assert workspace.status(workspace.tree.find("c")).verdict == "not-judged"
    assert list(workspace.evidence.refused) == [spoilt]


# ---- scale -----------------------------------------------------------------------------------------------

COUNT = 10_000
TIMED = """
import sys, time
from pathlib import Path
started = time.perf_counter()
from isobit.contracts.options import Options
from isobit.contracts.workspace import Workspace
workspace = Workspace([Path(sys.argv[1])])
entries = workspace.choose([])
assert len(entries) == int(sys.argv[3]), len(entries)
if sys.argv[2] == "stale":
    found = workspace.stale(entries, Options(level=2))
else:
    found = [e for e in entries if workspace.status(e).verdict != "kept"]
assert workspace.evidence.refused == {}
print(len(found), time.perf_counter() - started)
"""


def timed(folder, what: str) -> tuple[int, float]:
    """In a fresh process, imports included: how many are not settled, and the seconds."""
    arguments = [sys.executable, "-c", TIMED, str(folder), what, str(COUNT)]
    found = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()
    return int(found[0]), float(found[1])


def grow(folder, claims=("c",)) -> Workspace:
    """Half of them are one chain, the others a binary tree."""
    for n in range(COUNT):
        below = (
            ()
            if n in (0, COUNT // 2)
            else (f"c{n - 1}",)
            if n < COUNT // 2
            else (f"c{(n + COUNT // 2 - 1) // 2}",)
        )
        write(
            folder / f"{n % 100:02d}",
            f"c{n}",
            depends_on=below,
            title=f"contract {n}",
            claims=claims,
        )
    return Workspace([folder])


def test_ten_thousand_contracts(tmp_path, capsys):
    workspace = grow(tmp_path)
    plain = Evidence(tmp_path / ".isobit")
    for entry in workspace.choose([]):
        quickly(plain, Finding(entry.id, workspace.tree.digest(entry.id), "", 2, (record_of(),)))
    runs = [timed(tmp_path, "stale") for _ in range(4)]
    assert {count for count, _ in runs} == {0}
    seconds = statistics.median(second for _, second in runs[1:])
    with capsys.disabled():
        print(f"\n{COUNT:,} contracts: stale in {seconds:.2f} s (first {runs[0][1]:.2f} s)")
    assert seconds < 6.0
    write(tmp_path / "00", "c0", title="other")
    assert timed(tmp_path, "stale")[0] == COUNT // 2


@pytest.mark.full
def test_a_million_records(tmp_path, capsys):
    claims = tuple(f"claim-{n}" for n in range(25))
    workspace = grow(tmp_path, claims)
    records = tuple(record_of(detail="x" * 40, claim=claim) for claim in claims)
    plain = Evidence(tmp_path / ".isobit")
    for entry in workspace.choose([]):
        for day in range(4):
            quickly(
                plain,
                Finding(
                    entry.id, workspace.tree.digest(entry.id), "", 2, records, f"2027-01-{day}"
                ),
            )
    runs = [timed(tmp_path, "status") for _ in range(3)]
    assert {count for count, _ in runs} == {0}
    seconds = statistics.median(second for _, second in runs)
    with capsys.disabled():
        print(f"\n1,000,000 records: status of {COUNT:,} contracts in {seconds:.2f} s")
    assert (
        seconds < 60.0
    )  # every record is read, hashed and checked: levels are never taken from a header


def quickly(evidence: Evidence, finding: Finding) -> None:
    """As Evidence.write, without waiting for the disk: these need not survive anything."""
    from isobit import files

    keep = files.write_text
    files.write_text = lambda path, text: path.write_text(text) and None
    try:
        evidence.write(finding)
    finally:
        files.write_text = keep
