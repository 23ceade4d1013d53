"""Entries of a run's log: what cannot be read is found and counted, and never judged; nothing is guessed.

1. The last entry of a killed run is shown, and does not count; one before it counts against the log.
2. Names, steps and ends of lines: each entry is one point of a curve.
3. Memory does not grow with a log: curves in a file are those in memory, and the peak at 10 times the lines is that of
   one time. A million lines (`./check --full`).
"""

import json
import math
import random
import re
import time
import tracemalloc

import pytest

from isobit.cli.main import main
from isobit.guards.run_log import curves, rules
from isobit.guards.run_log.curves import Curve
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import judge_log
from tests.guards.test_run_log import STEPS, WRITERS, healthy, write_csv, write_jsonl
from tests.peak_memory import peak_of


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


# ---- 3. long logs -------------------------------------------------------------------------------------------


def resumed_often(draw, count):
    step = 0
    for _ in range(count):
        step = max(0, step + draw.choice((1, 1, 1, 1, 2, 0, -1, -40)))
        yield step, draw.choice((math.nan, math.inf, -0.0, draw.gauss(2, 1), 0.0))


@pytest.mark.parametrize("several", [False, True])
def test_a_curve_in_a_file_is_that_in_memory(several, monkeypatch):
    """Every way to read and cut it, with blocks of every size, against a list."""
    for seed in range(5):
        draw = random.Random(seed)
        points = list(resumed_often(draw, 300))
        kept, backs = [], []
        for point in points:
            if kept and (point[0] < kept[-1][0] or (point[0] == kept[-1][0] and not several)):
                backs.append((kept[-1][0], point[0]))
                kept = [one for one in kept if one[0] < point[0]]
            kept.append(point)
        for held in (1, 3, 64, 300, 1000):
            monkeypatch.setattr(curves, "HELD", held)
            curve = Curve(points)
            assert len(curve) == 300
            assert repr(list(curve)) == repr(points) == repr([curve[at] for at in range(300)])
            assert repr(curve[-7:200:-3]) == repr(points[-7:200:-3])
            found, places, count = curves.settled(curve, several)
            assert repr(list(found)) == repr(kept)
            assert (list(places), count) == (backs, len(backs))
            with pytest.raises(IndexError):
                curve[300]


def test_findings_do_not_depend_on_what_is_in_memory(tmp_path, monkeypatch, capsys):
    rows = healthy()
    rows[1000:1000] = [dict(row) for row in rows[900:1000]]
    for step in (300, 700, 1500):
        rows[step]["loss"] = 9.0
    rows[1832]["grad_norm"], rows[40]["loss"] = math.nan, None
    for row in rows[600:]:
        row["learning_rate"] *= 1.03
    a, b = write_jsonl(tmp_path / "a", rows), write_jsonl(tmp_path / "b", healthy(2000, every=3))
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 1e-3\nlr_scheduler_type: constant\n")
    wanted = None
    for held, lines in ((1 << 14, 8192), (100, 16)):
        monkeypatch.setattr(curves, "HELD", held)
        monkeypatch.setattr(rules, "ROWS", lines)
        found = []
        for words in ([a, "--config", config], [a, b, "--same"]):
            page = tmp_path / "page.html"
            assert main(["runlog", *map(str, words), "--json", "--html", str(page)]) == 1
            record = json.loads(capsys.readouterr().out)
            record.pop("provenance")
            drawn = re.sub("<metadata>.*?</metadata>|<footer.*", "", page.read_text(), flags=re.S)
            found.append((record, drawn))
        wanted = wanted or found
        assert found == wanted
    assert {"spike-loss", "schedule", "nonfinite", "repeated-steps"} <= {
        one["rule"] for one in wanted[0][0]["logs"][0]["findings"]
    }


def test_a_median_is_that_of_sorting():
    draw = random.Random(0)
    for count in (1, 2, 3, 100, 101):
        values = [draw.gauss(0, 1) * 10 ** draw.uniform(-300, 300) for _ in range(count)]
        values += [values[0], 5e-324, math.inf]
        assert rules.middle_of(lambda values=values: values) == sorted(values)[len(values) // 2]
    assert rules.middle_of(list) == 0.0


def worst(path, lines):
    """Write a log that has much of everything: resumes, findings of a watch, spikes, numbers that are not finite."""
    draw = random.Random(0)
    with open(path, "w") as file:
        for at in range(lines):
            entry = {"step": at - at % 50 // 49 * 3, "loss": draw.gauss(3, 0.05), "lr": 1e-3}
            entry["grad_norm"] = math.exp(draw.gauss(-1, 0.2))
            entry["loss" if at % 7 else "grad_norm"] = draw.choice((math.nan, 90.0, 3.0, 0.0))
            file.write(json.dumps(entry) + "\n")
            finding = {"kind": "finding", "name": "spike-loss", "step": at, "message": f"at {at}"}
            file.write(json.dumps(finding) + "\n")
            file.write("no entry\n" * (at % 100 == 0))


def test_memory_does_not_grow_with_a_log(tmp_path, monkeypatch, capsys):
    """Tiny limits, so that a short log passes them; the largest memory at 10 times the lines is that of one time."""
    monkeypatch.setattr(curves, "HELD", 256)
    monkeypatch.setattr(rules, "ROWS", 64)
    for module in (curves, rules):
        monkeypatch.setattr(module, "STEPS_KEPT", 100)
    monkeypatch.setattr(curves, "REPORTED_KEPT", 100)
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 2e-3\nlr_scheduler_type: constant\n")
    page = str(tmp_path / "page.html")
    peaks = []
    for lines in (200, 500, 5_000):  # the first loads what is loaded once
        log = tmp_path / str(lines)
        worst(log, lines)
        tracemalloc.start()
        try:
            words = ["runlog", str(log), "--config", str(config), "--html", page, "--json"]
            assert main(words) == 1
            assert main(["runlog", str(log), str(log), "--same", "--html", page]) == 1
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert f'"rows": {2 * lines + lines // 100}' in capsys.readouterr().out
    assert peaks[2] < 1.2 * peaks[1], peaks  # the picture has more points


@pytest.mark.full
def test_a_million_lines(tmp_path, capsys):
    peaks = []
    for lines in (100_000, 1_000_000):
        path = write_jsonl(tmp_path / "log", healthy(lines))
        started = time.process_time()
        code, peak = peak_of(lambda path=path: main(["runlog", str(path), "--norms", "unclipped"]))
        assert code in (0, 1)
        peaks.append(peak)
    assert time.process_time() - started < 30  # 10 on a shared core of 2.5 GHz
    assert "1,000,000 of loss" in capsys.readouterr().out
    assert peaks[1] < peaks[0] + 8 * 2**20, peaks
