"""Entries of a run's log: what cannot be read is found and counted, and never judged; nothing is guessed.

1. The last entry of a killed run is shown, and does not count; one before it counts against the log.
2. Names, steps and ends of lines: each entry is one point of a curve.
3. A million lines (`./check --full`).
"""

import json
import math
import time

import pytest

from isobit.cli.main import main
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import judge_log
from tests.guards.test_run_log import STEPS, WRITERS, healthy, write_csv, write_jsonl


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_the_last_line_of_a_killed_run(form, tmp_path, capsys):
    path = WRITERS[form](tmp_path / "log", healthy())
    path.write_text(path.read_text()[:-20])
    log = read_log(path)
    assert (log.rows, log.skipped, log.cut, log.unreadable) == (STEPS, 1, 1, 0)
    found = judge_log(log).findings
    assert [(f.rule, f.severity, f.step) for f in found] == [("cut-off", "info", STEPS - 2)]
    assert main(["runlog", str(path)]) == 0
    assert "the last entry is not whole" in capsys.readouterr().out


UNREADABLE = (
    '{"step": 101, "lo',
    "Traceback (most recent call last):",
    "[1, 2]",
    "null",
    "[" * 100_000,
    '{"step": 101, "loss": 1.0} {"step": 102, "loss": 1.0}',
    '{"step": 101, "loss": "high"}',
    '{"step": 101, "loss": [1.0]}',
    '{"step": "x", "loss": 1.0}',
    '{"step": 1e300, "loss": 1.0}',
    '{"step": NaN, "loss": 1.0}',
    f'{{"step": 101, "loss": 1{"0" * 5000}}}',
    "\x00\x01\x7f",
)


def test_entries_that_cannot_be_read_count(tmp_path, capsys):
    """The rules have not seen them, so that the log is not called kept."""
    path = write_jsonl(tmp_path / "log", healthy(200))
    lines = path.read_text().splitlines(keepends=True)
    assert judge_log(read_log(path)).findings == ()
    for line in UNREADABLE:
        path.write_text("".join([*lines[:101], line + "\n", *lines[101:]]))
        log = read_log(path)
        assert (log.rows, log.unreadable, log.cut, log.numbered) == (201, 1, 0, True), line[:60]
        found = judge_log(log).findings
        assert [(f.rule, f.severity, f.step) for f in found] == [("unreadable", "warning", 100)]
    path.write_text("".join([*lines[:101], *(line + "\n" for line in UNREADABLE), *lines[101:]]))
    assert main(["runlog", str(path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{len(UNREADABLE)} of {200 + len(UNREADABLE)} entries cannot be read" in shown


def test_rows_of_csv_with_other_fields_are_not_read(tmp_path):
    path = write_csv(tmp_path / "log", healthy())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:500], "step,loss\n", "5,6,7,8,9\n", "\n", *lines[500:]]))
    log = read_log(path)
    assert (log.rows, log.unreadable, len(log.curves["loss"])) == (STEPS + 2, 2, STEPS)
    (tmp_path / "spaces").write_text('step, loss, note,\n0, 1.5,,\n1, 1.25, "a, b",\n')
    assert read_log(tmp_path / "spaces").curves == {"loss": ((0, 1.5), (1, 1.25))}


@pytest.mark.parametrize("rows", [[{"step": 7, "loss": 1.0}] * 5, [{"step": 7, "loss": 1.0}] * 2])
def test_one_step_again_and_again(rows, tmp_path):
    path = write_jsonl(tmp_path / "log", rows)
    assert [f.rule for f in judge_log(read_log(path)).findings] == ["repeated-steps"]
    assert main(["runlog", str(path)]) == 1


def test_the_mean_of_a_whole_run_is_no_loss_of_a_step(tmp_path, capsys):
    """transformers' Trainer ends its history with `train_loss` at the last step."""
    rows = [*healthy(), {"step": STEPS - 1, "train_loss": 3.0}]
    path = write_jsonl(tmp_path / "log", rows)
    assert main(["runlog", str(path)]) == 0
    assert "1 of train_loss not used" in " ".join(capsys.readouterr().out.split())
    assert read_log(write_jsonl(tmp_path / "b", [{"train_loss": 1.0}])).curves["loss"] == (
        (0, 1.0),
    )


def test_text_in_a_line_does_not_end_it(tmp_path):
    """JSON allows characters that Python takes for ends of lines."""
    rows = [row | {"note": "a\u2028b\x85c\r"} for row in healthy(100)]
    (tmp_path / "log").write_bytes(
        "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows).encode()
    )
    log = read_log(tmp_path / "log")
    assert (log.rows, log.skipped, len(log.curves["loss"])) == (100, 0, 100)


def test_the_digest_is_that_of_what_is_judged(tmp_path):
    rows = healthy(50)
    first = read_log(write_jsonl(tmp_path / "log", rows)).digest()
    assert read_log(write_jsonl(tmp_path / "log", rows)).digest() == first
    rows[20]["loss"] = math.nextafter(rows[20]["loss"], 9.0)
    assert read_log(write_jsonl(tmp_path / "log", rows)).digest() != first


@pytest.mark.full
def test_a_million_lines(tmp_path, capsys):
    path = write_jsonl(tmp_path / "log", healthy(1_000_000))
    started = time.process_time()
    assert main(["runlog", str(path), "--norms", "unclipped"]) in (0, 1)
    assert time.process_time() - started < 30  # 10 on a shared core of 2.5 GHz
    assert "1,000,000 of loss" in capsys.readouterr().out
