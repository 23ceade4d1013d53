"""A digest changes with a text, its source and everything it depends on; then exactly the dependents are stale."""

import random
import sys

import pytest

from isobit.contracts.options import Options
from isobit.contracts.store import tree as tree_module
from isobit.contracts.store.evidence import JudgedContract
from isobit.contracts.store.sources import find_file, imports_of
from isobit.contracts.store.tree import Tree, find_contracts
from isobit.contracts.workspace import Workspace
from isobit.errors import ContractError
from tests.contracts.written_contracts import record_of, write

RUN = Options(level=2)


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
@pytest.mark.sweep(2)
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


def settle(workspace: Workspace, verdict: str = "kept") -> None:
    for entry in workspace.choose([]):
        digest = workspace.tree.digest(entry.id)
        workspace.evidence.write(JudgedContract(entry.id, digest, "", 2, (record_of(verdict),)))


def stale(folder) -> list[str]:
    workspace = Workspace([folder])
    return [entry.id for entry in workspace.stale(workspace.choose([]), RUN)]


@pytest.mark.parametrize("verdict", ["kept", "broken"])
@pytest.mark.parametrize("id", DIAMOND)
@pytest.mark.sweep(4)
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
