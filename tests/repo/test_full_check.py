"""Shards of the full check: every test is in exactly one, and a failure or a run without tests is not a pass."""

import itertools
import json
import re
from pathlib import Path

import pytest

from benchmarks import full_check, records

ROOT = Path(__file__).parents[2]
SHARDS = full_check.SHARDS


def test_every_test_is_in_one_shard():
    shards = [full_check.files_of(at, SHARDS) for at in range(1, SHARDS + 1)]
    found = sorted(itertools.chain(*shards))
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    assert found == tests
    assert "tests/repo/test_full_check.py" in shards[0]
    assert all(path.startswith("tests/repo/") for path in shards[0])
    assert max(map(len, shards[1:])) - min(map(len, shards[1:])) <= 1


def test_what_decides_a_shard():
    one, modules = ["tests/test_bits.py"], ["isobit", "isobit.bits"]
    listed = {
        "src/isobit/bits.py": "1", "src/isobit/errors.py": "1", "src/isobit/library/data.yaml": "1",
        "csrc/order.h": "1", "tests/test_bits.py": "1", "tests/test_nn.py": "1",
        "tests/conftest.py": "1", "examples/zero_kl.py": "1", "benchmarks/records.py": "1",
        "benchmarks/rows.py": "1", "setup.py": "1", "constraints.txt": "1",
    }  # fmt: skip

    def digest(files, changed=None, dirty=""):
        def git(*words):
            if words[0] != "ls-tree":
                return dirty
            paths = words[words.index("--") + 1 :]
            inside = [x for x in listed if any(x == at or x.startswith(f"{at}/") for at in paths)]
            if "--name-only" in words:
                return "\n".join(inside)
            return "\n".join(f"blob {listed[x]}{x == changed}\t{x}" for x in inside)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(full_check, "git", git)
            patch.setattr(records, "git", git)
            return full_check.digest(files, modules)

    before, changes = digest(one), {path: digest(one, path) for path in listed}
    assert {path for path, found in changes.items() if found == before} == {
        "src/isobit/errors.py",  # not loaded
        "tests/test_nn.py",  # of another shard
        "benchmarks/records.py",
    }
    assert digest(one, dirty="diff") != before
    whole = ["tests/repo/test_names.py"]
    everything = {path for path in listed if digest(whole, path) != digest(whole)}
    assert everything == set(listed) - {"benchmarks/records.py"}


def test_files_that_a_test_names_decide_it():
    tests = [path for at in range(1, SHARDS + 1) for path in full_check.files_of(at, SHARDS)]
    found = full_check.named_by(["tests/profiling/test_timeline.py"], tests)
    assert "tests/profiling/test_ranks.py" in found
    assert "tests/comparing/test_derived.py" not in found


XML = """<testsuites><testsuite name="pytest" time="90.0">
<testcase classname="tests.a" name="test_good" time="1"/>
<testcase classname="tests.a" name="test_bad" time="1"><failure message="no">x</failure></testcase>
<testcase classname="tests.a" name="test_broken" time="1"><error message="no">x</error></testcase>
<testcase classname="tests.a" name="test_left" time="1"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_found_is_counted(tmp_path):
    path = tmp_path / "1-of-3.xml"
    path.write_text(XML)
    found = full_check.read_junit(path)
    assert (found.passed, found.skipped, found.seconds) == (1, ("no GPU",), 90)
    assert found.failed == ("tests.a::test_bad", "tests.a::test_broken")


PASSED = re.sub(r"<(failure|error).*?</\1>", "", XML)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Files that were run, where pytest writes `shards.xml` of each; all records are good."""

    def run(files, output, workers):
        ran.append(files)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(ran.xml)
        return ["isobit"]

    class Ran(list):
        xml = PASSED

    ran = Ran()
    monkeypatch.setattr(full_check, "ROOT", tmp_path)
    monkeypatch.setattr(full_check, "run", run)
    monkeypatch.setattr(full_check, "files_of", lambda at, shards: [f"test_{at}.py"])
    monkeypatch.setattr(full_check, "digest", lambda *words: "this-code")
    monkeypatch.setattr(full_check, "git", lambda *words: "1234567")
    monkeypatch.setattr(full_check, "modified_sources", lambda: "")
    monkeypatch.setattr(full_check, "is_good", lambda name: True)
    return ran


@pytest.mark.parametrize(
    ("xml", "code"),
    [(XML, 1), (PASSED, 0), ("<testsuites><testsuite/></testsuites>", 1)],
)
def test_shards_that_ran_are_not_run_again(shards, monkeypatch, capsys, xml, code):
    shards.xml = xml
    assert full_check.main(["--shards", "2", "--only", "2"]) == code
    assert "1 of 2 shards ran" in capsys.readouterr().out
    assert full_check.main(["--shards", "2"]) == code
    assert shards == [["test_2.py"], ["test_1.py"]]
    assert "2 of 2 shards ran" in capsys.readouterr().out
    monkeypatch.setattr(full_check, "digest", lambda *words: "other-code")
    full_check.main(["--shards", "2"])
    assert len(shards) == 4


def test_a_shard_whose_sources_changed_while_it_ran_is_not_kept(shards, monkeypatch, capsys):
    """The others may have passed: the whole has not."""
    assert full_check.main(["--shards", "2", "--only", "1"]) == 0

    def digest(files, modules, commit="HEAD"):
        return commit if files == ["test_2.py"] else "this-code"

    monkeypatch.setattr(full_check, "digest", digest)
    assert full_check.main(["--shards", "2"]) == 2
    printed = capsys.readouterr()
    assert "1 of 2 shards ran" in printed.out
    assert "its sources changed while it ran" in printed.err


def test_a_test_that_was_left_out_and_is_no_longer_makes_its_shard_run(shards, monkeypatch):
    monkeypatch.setattr(full_check, "RECORDED", {"test_1.py::test_long": "leaf"})
    assert full_check.main(["--shards", "2"]) == full_check.main(["--shards", "2"]) == 0
    assert len(shards) == 2
    monkeypatch.setattr(full_check, "RECORDED", {})
    assert full_check.main(["--shards", "2"]) == 0
    assert shards[2:] == [["test_1.py"]]


def test_tests_that_are_left_out_exist_and_need_their_record(tmp_path, monkeypatch):
    for name in full_check.RECORDED:
        path, test = name.split("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
    assert {*full_check.RECORDED.values()} <= {*records.COMMANDS}
    monkeypatch.setattr(full_check, "RECORDS", tmp_path)
    for current, ended, good in ((True, {}, True), (True, {"exit": 1}, False), (False, {}, False)):
        monkeypatch.setattr(full_check, "is_current", lambda name, current=current: current)
        (tmp_path / "leaf.json").write_text(json.dumps(ended))
        assert full_check.is_good("leaf") == good


def test_a_record_of_other_sources_is_not_a_pass(shards, monkeypatch, capsys):
    monkeypatch.setattr(full_check, "is_good", lambda name: name != "bugs")
    assert full_check.main(["--shards", "1"]) == 1
    assert "not of these sources, or not good: bugs" in capsys.readouterr().out
