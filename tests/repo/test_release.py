"""A release is refused unless its commit is ready; archives hold nothing of the machine; records name their sources."""

import gzip
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks import records
from benchmarks.ratios import Ratio

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / "packaging/release.py"))


def test_there_is_one_version():
    assert RELEASE["find_version"]() == isobit.__version__
    faults = [
        fault
        for fault in RELEASE["faults_of"](isobit.__version__)
        if "signed" not in fault and ".pub" not in fault and "CHANGELOG" not in fault
    ]
    assert faults == []


@pytest.fixture
def ready(tmp_path):
    """A checkout that can be released, as far as its files say."""
    for name in ("CITATION.cff", "src/isobit/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = isobit.__version__
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version} (2026-01-31)\n\n- one\n")
    (tmp_path / "docs/reference/keys").mkdir(parents=True)
    (tmp_path / f"docs/reference/keys/isobit-{version}.pub").write_text("a key")
    (tmp_path / "src/isobit/library").mkdir()
    (tmp_path / "src/isobit/library/evidence.json").write_text('{"signature": {}}')
    return tmp_path


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_commit_that_is_ready_has_no_fault(ready):
    assert RELEASE["faults_of"](isobit.__version__, ready) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda p: replace(p / "CITATION.cff", isobit.__version__, "0.0.9"), "CITATION.cff"),
        (lambda p: replace(p / "CHANGELOG.md", "(2026-01-31)", "(not released yet)"), "CHANGELOG"),
        (lambda p: replace(p / "CHANGELOG.md", isobit.__version__, "9.9.9"), "CHANGELOG"),
        (lambda p: (p / "src/isobit/library/evidence.json").write_text("{}"), "not signed"),
        (lambda p: next((p / "docs/reference/keys").iterdir()).unlink(), "there is no docs/reference"),
    ],
)  # fmt: skip
def test_a_commit_that_is_not_ready_is_refused(ready, change, word):
    change(ready)
    (fault,) = RELEASE["faults_of"](isobit.__version__, ready)
    assert word in fault


def pack(path, names, seconds, owner):
    """Write an archive as setuptools does: times, owners and modes of the machine."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            data = name.encode() * 100
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid, info.uname = len(data), seconds, len(owner), owner
            info.mode = 0o664 if seconds % 2 else 0o600
            archive.addfile(info, io.BytesIO(data))


def test_archives_are_equal_whoever_made_them(tmp_path):
    one, other = tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    pack(one, ["x/a", "x/b"], 1000, "someone")
    pack(other, ["x/b", "x/a"], 2001, "somebody else")
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        RELEASE["make_plain"](path, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        assert [(m.name, m.uname, m.mode) for m in archive] == [
            ("x/a", "", 0o644),
            ("x/b", "", 0o644),
        ]
        assert archive.extractfile("x/b").read() == b"x/b" * 100
    assert b"some" not in gzip.decompress(one.read_bytes())


def test_a_release_compiles_its_kernels(monkeypatch, capsys):
    """Kernels from a folder are for a rehearsal only, and their digest is printed."""
    monkeypatch.setattr("sys.argv", ["release.py", "--kernels", "src/isobit"])
    with pytest.raises(SystemExit) as ended:
        RELEASE["main"]()
    assert ended.value.code == 2
    assert "a release compiles its kernels twice" in capsys.readouterr().err


def test_kernels_of_a_rehearsal_are_copied(tmp_path, capsys):
    kernels, source = tmp_path / "kernels", tmp_path / "source"
    kernels.mkdir()
    (source / "src/isobit").mkdir(parents=True)
    (kernels / "_native.so").write_bytes(b"kernels")
    (kernels / "_native.json").write_text('{"library": "0123456789abcdef"}')
    RELEASE["copy_kernels"](kernels, source)
    assert (source / "src/isobit/_native.so").read_bytes() == b"kernels"
    assert "not compiled: taken with library digest 0123456789ab" in capsys.readouterr().out


GOOD = """58 contracts: 58 judged elsewhere only
shipped evidence: 58 of 58 kept, judged on another machine
  on AVX512; signed by Ed25519 key ab12
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("58 of 58", "57 of 58", "shipped as kept: 57 of 58, of 58 contracts"),
        ("58 of 58", "57 of 57", "shipped as kept: 57 of 57, of 58 contracts"),
        ("shipped evidence: 58 of 58 kept", "", "shipped as kept: none, of 58 contracts"),
        ("signed by Ed25519 key ab12", "not signed", "it is not signed by Ed25519 key ab12"),
        ("ab12", "ab12\nshipped evidence is stale for 1, and", "shipped evidence is stale for 1"),
    ],
)
def test_evidence_in_the_wheel_that_is_not_of_a_release_is_named(old, new, fault):
    assert RELEASE["faults_of_status"](GOOD, "ab12") == []
    assert old in GOOD
    assert RELEASE["faults_of_status"](GOOD.replace(old, new), "ab12") == [fault]


def test_stale_evidence_is_not_taken_for_kept():
    """The table of a wheel with stale evidence has the words "not kept", which once satisfied a rehearsal."""
    printed = "and 18 more that are not kept\n58 contracts: 58 not-judged\nshipped evidence is stale for 58, and"
    assert RELEASE["faults_of_status"](printed, "") == [
        "shipped as kept: none, of 58 contracts",
        "shipped evidence is stale for 58",
    ]


def test_a_commit_during_a_build_does_not_get_into_it(monkeypatch, tmp_path):
    """The commit is read when the program starts; each later step names it."""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet"], check=True)
    times = ("1700000000 +0000", "1800000000 +0000")
    commits = []
    for when in times:
        monkeypatch.setenv("GIT_COMMITTER_DATE", when)
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "one"], check=True)
        done = subprocess.run(
            [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        )
        commits.append(done.stdout.strip())
    environment = RELEASE["environment"]
    monkeypatch.setitem(environment.__globals__, "COMMIT", commits[0])
    monkeypatch.setitem(environment.__globals__["run"].__kwdefaults__, "cwd", tmp_path)
    assert environment()["SOURCE_DATE_EPOCH"] == "1700000000"


def test_digits_of_a_key(tmp_path):
    key = Ed25519PrivateKey.generate().public_key()
    path = tmp_path / "key.pub"
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    path.write_bytes(key.public_bytes(*form) + b" a comment\n")
    assert RELEASE["key_digits"](path) == key.public_bytes_raw().hex()


def stored():
    return {path.stem: json.loads(path.read_text()) for path in records.RECORDS.glob("*.json")}


def test_every_record_has_a_command():
    """A record that a page shows must exist (test_docs); one that is not made yet is in no page."""
    assert len(stored()) > 30
    assert set(stored()) <= set(records.COMMANDS)


@pytest.mark.parametrize("name", sorted(stored()))
def test_a_record_is_of_the_sources_that_it_says(name):
    record = stored()[name]
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{record['commit']}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    if known.returncode:
        pytest.skip("this clone does not have that commit")
    if "sources" in record:  # records of older benchmarks name their commit alone
        sources = records.sources_of(name, record["commit"], records.loaded(record))
        assert record["sources"] == records.sources_digest(record["commit"], sources)


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (lambda *options: 0, 0),
        (lambda *options: 1, 1),
        (lambda *options: sys.exit("it needs a package"), 2),
        (lambda *options: {}["a mistake"], 2),
    ],
)
def test_a_benchmark_that_could_not_run_has_nothing_broken(run, code, monkeypatch):
    """`make` stores a record of code 1, which is a broken promise, and of no other but 0."""
    monkeypatch.setitem(sys.modules, "benchmarks.leaf", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "leaf"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__")
    assert ended.value.code == code


def test_sources_of_a_record_are_those_that_its_command_reaches():
    """The package decides every record; a benchmark, an example or a planted bug decides those that use it."""
    for name in records.COMMANDS:
        assert set(records.PACKAGE) <= set(records.sources_of(name))
    assert records.sources_of("one-run") == records.PACKAGE
    assert set(records.sources_of("step")) - set(records.PACKAGE) == {
        "benchmarks/step.py",
        "benchmarks/ratios.py",
    }
    assert {"tests/simulator/bugs/messages.py", "tests/simulator/clean_programs.py"} <= set(
        records.sources_of("bugs")
    )
    assert {"tests/certifying/right_kernels.py", "examples/certify/softmax.py"} <= set(
        records.sources_of("certificates")
    )
    assert "benchmarks/certificates.py" not in records.sources_of("certify")
    assert "examples/grpo_vllm.py" in records.sources_of("vllm-grpo")
    assert "tests" in records.sources_of("full-check")


def test_a_run_says_which_modules_its_processes_loaded(capfdbinary):
    """Those of a child too; sources of a record are these, and the package's data and kernels."""
    child = "import isobit.order.plan, os; os._exit(0)"
    code = f"import isobit, subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code += "; isobit.linear"
    code += "; print('shown'); sys.stderr.write('told'); sys.exit(1)"
    printed, exit_code, modules = records.run_and_watch([sys.executable, "-c", code])
    assert (printed, exit_code) == ("shown\n", 1)
    assert b"told" in capfdbinary.readouterr().err
    assert {"isobit", "isobit.ops.linear.op", "isobit.order.plan"} <= set(modules)
    sources = records.sources_of("linear", modules=modules)
    assert {
        "csrc",
        "src/isobit/order/plan.py",
        "src/isobit/__init__.py",
        "benchmarks/linear.py",
    } <= set(sources)
    assert "src/isobit/library/gelu.contract.yaml" in sources  # its claims are in elementwise.py
    assert "src/isobit/library/softmax.contract.yaml" not in sources
    assert not any(re.match(r"src/isobit/certifying/.*[.]py$", each) for each in sources)
    with pytest.raises(ValueError, match="no process"):
        records.run_and_watch([sys.executable, "-c", "1"])


def test_a_contract_decides_what_loads_its_module():
    library = "src/isobit/library"
    files = [
        f"{library}/softmax.py",
        f"{library}/attention/__init__.py",
        f"{library}/elementwise.py",
    ]
    for module, place in (
        ("isobit.library.softmax", "softmax.contract.yaml"),
        ("isobit.library.attention.claims", "attention/contract.yaml"),
        ("isobit.library.attention", "attention/contract.yaml"),
    ):
        assert records.decides(f"{library}/{place}", [module], files)
        assert not records.decides(f"{library}/{place}", ["isobit.library.softmaxes"], files)
    for data in (f"{library}/silu.contract.yaml", "src/isobit/guards/rules.yaml"):
        assert records.decides(data, [], files)


def test_pytest_does_not_hide_what_it_loads(tmp_path):
    """Its own finder comes before others, and finds the modules of packages with plugins."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    import isobit.order.plan\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    printed, code, modules = records.run_and_watch(words)
    assert code == 0, printed
    assert {"isobit", "isobit.order", "isobit.order.plan"} <= set(modules)


def test_sources_are_told_apart(monkeypatch):
    """The digest covers the package, its kernels and the benchmarks, and not what is made from them."""
    listed = []
    monkeypatch.setattr(records, "git", lambda *words: "\n".join(listed))
    listed[:] = ["100644 blob aa\tsrc/isobit/bits.py"]
    first = records.sources_digest()
    listed.append("100644 blob bb\tsrc/isobit/library/evidence.json")
    assert records.sources_digest() == first
    listed[0] = "100644 blob ab\tsrc/isobit/bits.py"
    assert records.sources_digest() != first


def test_all_goes_on_where_it_was_and_past_a_failure(monkeypatch, tmp_path, capsys):
    made = []

    def make(name):
        made.append(name)
        if name == "model":
            raise subprocess.CalledProcessError(1, name)
        save(name)
        return 0

    def save(name):
        records.save(name, {"commit": "x", "sources": "now", "command": records.COMMANDS[name]})

    monkeypatch.setattr(records, "make", make)
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(records, "sources_digest", lambda *a: "now")
    monkeypatch.setattr(records, "modified_sources", lambda: "")
    wanted = ["linear", "model", "step"]
    save("linear")
    assert records.main([*wanted, "--all"]) == 1
    assert sorted(made) == ["model", "step"]
    assert "1 of 2 records made; failed: ['model']" in capsys.readouterr().out
    monkeypatch.setattr(records, "modified_sources", lambda: "M src/isobit/bits.py")
    with pytest.raises(SystemExit):
        records.main([*wanted, "--all"])


def test_a_record_says_what_its_command_found(monkeypatch, tmp_path):
    """Exit code 1 is stored, anything else and an output without a table make no record."""
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "describe_run", lambda name, commit: {"commit": "x"})
    monkeypatch.setattr(records, "git", lambda *words: "")

    def ending_with(code, printed):
        program = f"import isobit.bits, sys; print({printed!r}); sys.exit({code})"
        monkeypatch.setitem(records.COMMANDS, "linear", f"python -c {shlex.quote(program)}")
        return records.make("linear")

    table = "┃ a ┃\n│ 1 │\nand a line"
    assert ending_with(0, table) == 0
    assert "exit" not in json.loads((tmp_path / "linear.json").read_text())
    assert ending_with(1, table) == 1
    found = json.loads((tmp_path / "linear.json").read_text())
    assert (found["exit"], found["lines"]) == (1, ["and a line"])
    assert found["tables"] == [{"header": ["a"], "rows": [["1"]]}]
    with pytest.raises(subprocess.CalledProcessError):
        ending_with(2, table)
    with pytest.raises(ValueError, match="no table"):
        ending_with(0, "nothing was compiled")


def test_records_with_times_are_made_alone():
    assert set(records.TIMED) < set(records.COMMANDS)


def test_a_ratio_near_one_is_about_one_and_few_rounds_are_none():
    assert Ratio.of([1.0] * 7, [0.5] * 7).cells() == ("2.00", "2.00 to 2.00")
    near = Ratio.of([0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.2], [1.0] * 7)
    assert near.cells() == ("about 1", "0.95 to 1.10")
    assert Ratio.mean([Ratio((2.0,) * 7), Ratio((0.5,) * 9)]).rounds == (1.0,) * 7
    with pytest.raises(ValueError, match="7 rounds"):
        Ratio.of([1.0] * 6, [1.0] * 6).cells()


def printed_table(width, *rows):
    """Return what Rich prints of a table with the words of rows, on a console of this width."""
    table = Table("script", "fault", "found")
    for row in rows:
        table.add_row(*row)
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_wide_rows_are_joined_and_rows_that_leave_out_their_first_cell_are_not():
    rows = [["ddp", "", "nothing"], ["", "clips after the step", "clipped"], ["", "loss not", "x"]]
    assert records.read_text(printed_table(160, *rows))["tables"][0]["rows"] == rows
    wide = [["ddp", "clips after the step, and again later", "nothing"], ["fsdp2", "none", "x"]]
    narrow = printed_table(40, *wide)
    assert narrow.count("\n") > printed_table(160, *wide).count("\n")
    assert records.read_text(narrow)["tables"][0]["rows"] == wide
