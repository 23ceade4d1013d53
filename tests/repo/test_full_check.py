"""Shards of the full check: every test is in exactly one, and a failure or a run without tests is not a pass."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import full_check

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path):
    """Seven files with the project's conftest; file i has i tests."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    full: x\n    sweep: x\n")
    for at in range(1, 8):
        tests = [f"def test_{at}_{k}():\n    pass\n" for k in range(at)]
        (tmp_path / f"test_file{at}.py").write_text("\n\n".join(tests))
    return tmp_path


def collect(folder, *words):
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", *words, str(folder)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done, re.findall(r"::(test_\w+)", done.stdout)


def test_every_test_is_in_one_shard(files):
    shards = [collect(files, "--shard", f"{at}/3")[1] for at in (1, 2, 3)]
    assert [len(found) for found in shards] == [1 + 4 + 7, 2 + 5, 3 + 6]
    assert sorted(itertools.chain(*shards)) == sorted(collect(files)[1])
    done, _ = collect(files, "--shard", "4/3")
    assert done.returncode == 4
    assert "expected 1/N to N/N, received 4/3" in done.stderr


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


@pytest.mark.parametrize(
    ("xml", "code"),
    [
        (XML, 1),
        (re.sub(r"<(failure|error).*?</\1>", "", XML), 0),
        ("<testsuites><testsuite/></testsuites>", 1),
    ],
)
def test_shards_that_ran_are_not_run_again(tmp_path, monkeypatch, capsys, xml, code):
    ran = []

    def run(shard, shards, output):
        ran.append((shard, shards))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(xml)

    monkeypatch.setattr(full_check, "ROOT", tmp_path)
    monkeypatch.setattr(full_check, "run", run)
    monkeypatch.setattr(full_check, "digest", lambda: "this-code")
    monkeypatch.setattr(full_check, "git", lambda *words: "1234567")
    monkeypatch.setattr(full_check, "modified_sources", lambda: "")
    assert full_check.main(["--shards", "2", "--only", "2"]) == code
    assert "1 of 2 shards ran" in capsys.readouterr().out
    assert full_check.main(["--shards", "2"]) == code
    assert ran == [(2, 2), (1, 2)]
    assert "2 of 2 shards ran" in capsys.readouterr().out
    monkeypatch.setattr(full_check, "digest", lambda: "other-code")
    full_check.main(["--shards", "2"])
    assert len(ran) == 4
