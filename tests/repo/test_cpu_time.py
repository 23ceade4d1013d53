"""Theorem: a whole run that takes a quarter more CPU time than its record fails, and names what grew."""

import json
import os
from types import SimpleNamespace

import pytest

from tests import cpu_time
from tests.cpu_time import Times, judge

pytest_plugins = ["pytester"]
RECORD = Times(0.01, {"tests/a.py": 60.0, "tests/b.py": 40.0})


@pytest.mark.parametrize(
    ("found", "fails"),
    [
        (Times(0.01, {"tests/a.py": 84.0, "tests/b.py": 40.0}), False),
        (Times(0.01, {"tests/a.py": 86.0, "tests/b.py": 40.0}), True),
        (Times(0.03, {"tests/a.py": 180.0, "tests/b.py": 120.0}), False),  # a slow machine
        (Times(0.005, {"tests/a.py": 60.0, "tests/b.py": 40.0}), True),  # a fast one
        (Times(0.01, {**RECORD.files, "tests/new.py": 24.0}), False),
        (Times(0.01, {**RECORD.files, "tests/new.py": 26.0}), True),
        (Times(0.01, {"tests/a.py": 10.0, "tests/b.py": 110.0}), False),  # only the total decides
    ],
)
def test_a_quarter_more_fails(found, fails):
    assert bool(judge(RECORD, found)) == fails


def test_the_message_names_what_grew_and_what_to_do():
    said = judge(RECORD, Times(0.01, {"tests/a.py": 61.0, "tests/b.py": 140.0}))
    assert "expected: tests in 125 CPU seconds" in said
    assert "received: 201 CPU seconds" in said
    assert said.index("tests/b.py: +100.0 s") < said.index("tests/a.py: +1.0 s")
    assert "./check --record-time" in said


def test_a_part_of_the_tests_is_not_judged(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_time, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in RECORD.files:
        (tmp_path / name).touch()
    assert cpu_time.is_whole(RECORD, RECORD)
    assert not cpu_time.is_whole(RECORD, Times(0.01, {"tests/a.py": 1.0}))
    (tmp_path / "tests/b.py").unlink()  # a file that was removed is not missed
    assert cpu_time.is_whole(RECORD, Times(0.01, {"tests/a.py": 1.0}))


def test_a_record_is_of_this_processor(monkeypatch, tmp_path):
    table = tmp_path / "table.json"
    assert cpu_time.read(table) is None
    table.write_text(json.dumps({"another processor": {"loop": 1.0, "files": {}}}))
    assert cpu_time.read(table) is None
    cpu_time.write(RECORD, table)
    assert cpu_time.read(table) == RECORD
    assert "another processor" in json.loads(table.read_text())


PLUGIN = """
import pytest
from tests import cpu_time

def pytest_addoption(parser):
    parser.addoption(cpu_time.OPTION, action="store_true")

def pytest_configure(config):
    cpu_time.ROOT, cpu_time.TABLE = config.rootpath, config.rootpath / "table.json"
    cpu_time.read.__defaults__ = cpu_time.write.__defaults__ = (cpu_time.TABLE,)
    config.pluginmanager.register(cpu_time.Watch(), "cpu time")
"""


def test_a_run_is_recorded_and_a_slower_one_fails(pytester, monkeypatch):
    paths = str(cpu_time.ROOT), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    pytester.makeconftest(PLUGIN)
    pytester.makepyfile(test_work="def test(): sum(range(10**6))", test_more="def test(): pass")
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not full"]
    assert pytester.runpytest_subprocess(*words, cpu_time.OPTION).ret == 0
    record = next(iter(json.loads((pytester.path / "table.json").read_text()).values()))
    assert set(record["files"]) == {"test_work.py", "test_more.py"}
    assert record["loop"] > 0
    pytester.makepyfile(test_work="def test(): sum(range(10**8))")
    slower = pytester.runpytest_subprocess(*words)
    assert slower.ret == 1
    slower.stdout.fnmatch_lines(["*grown most:*", "*test_work.py: +*"])


def test_workers_report_to_the_controller():
    controller = cpu_time.Watch()
    for files in ({"tests/a.py": 1.0}, {"tests/a.py": 2.0, "tests/b.py": 4.0}):
        told = {"cpu_time": {"loops": [0.1, 0.3], "files": files}}
        controller.pytest_testnodedown(SimpleNamespace(workeroutput=told), None)
    controller.pytest_testnodedown(SimpleNamespace(), "a worker that crashed")
    assert controller.times() == Times(0.2, {"tests/a.py": 3.0, "tests/b.py": 4.0})
    worker = SimpleNamespace(config=SimpleNamespace(workeroutput={}))
    controller.pytest_sessionfinish(worker)
    assert worker.config.workeroutput["cpu_time"]["files"] == controller.files
