"""What a user asks of `isobit runlog` is judged or said to be not judged; two recorded curves are compared.

1. A norm, a limit or a configuration that cannot be judged exits with 2; columns can be named.
2. Several faults in one log are all named, each once, whatever the number of steps.
3. `--same` finds the first step that differs, with both values, and nothing in equal logs.
4. The picture has round ticks and the numbers of the table; the HTML report has both. Hostile logs stay text.
"""

import json
import math
import random
import re

import pytest

from isobit.cli.main import main
from isobit.guards import Emitter, sinks
from isobit.guards.run_log.page import round_ticks
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import judge_log
from tests.guards.test_run_log import healthy, rise, write_csv, write_events, write_jsonl


def renamed(rows, **names):
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


# ---- 1. asked and not judged ---------------------------------------------------------------------------------


def test_a_norm_of_an_unknown_name_is_not_passed_over(tmp_path, capsys):
    rows = renamed(healthy(700), grad_norm="gradient_norm_after_clip")
    rows[300]["gradient_norm_after_clip"] = 50.0
    path = str(write_jsonl(tmp_path / "log", rows))
    assert main(["runlog", path]) == 2
    shown = capsys.readouterr().out
    assert "could not judge: norm-limit" in shown
    assert "--columns grad_norm=gradient_norm_after_clip" in shown
    assert "NOT JUDGED (norm-limit): 0 findings" in shown
    assert main(["runlog", path, "--columns", "grad_norm=gradient_norm_after_clip"]) == 1
    assert "norm-limit" in capsys.readouterr().out
    assert main(["runlog", path, "--columns", "grad_norm="]) == 0
    assert "(not norm-limit, plateau, schedule, reported)" in capsys.readouterr().out


def test_what_an_option_asks_for_is_judged_or_exits_with_2(tmp_path, capsys):
    rows = [{key: row[key] for key in ("step", "loss")} for row in healthy(700)]
    path = str(write_jsonl(tmp_path / "log", rows))
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 1e-3\nlr_scheduler_type: constant\n")
    assert main(["runlog", path]) == 0
    assert main(["runlog", path, "--norms", "unclipped"]) == 0
    for asked, rule in (
        (["--max-norm", "1"], "norm-limit"),
        (["--norms", "clipped"], "norm-limit"),
        (["--config", str(config)], "schedule"),
    ):
        capsys.readouterr()
        assert main(["runlog", path, *asked, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["logs"][0]["unanswered"] == [rule]
    rows[5]["loss"] = math.nan  # what is found counts more than what is not judged
    assert main(["runlog", str(write_jsonl(tmp_path / "log", rows)), "--max-norm", "1"]) == 1


def test_columns(tmp_path, capsys):
    names = {"step": "it", "loss": "a, b", "grad_norm": "gn", "learning_rate": "eta"}
    rows = renamed(healthy(200), **names)
    path = str(write_csv(tmp_path / "log", rows))
    assert main(["runlog", path]) == 2
    assert "other columns: it, a, b, gn, eta" in capsys.readouterr().err
    given = ["--columns", "loss=a, b,grad_norm=gn", "--columns", "lr=eta,step=it"]
    assert main(["runlog", path, *given, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["logs"][0]["entries"]
    assert entries == {"loss": 200, "grad_norm": 200, "lr": 200}
    for wrong, words in (
        ("loss=a", "loss=a"),
        ("loss=a, b,step=when", "step=when"),
        ("loss=a, b,lr=rate", "lr=rate"),
    ):
        assert main(["runlog", path, "--columns", wrong]) == 2
        assert words in capsys.readouterr().err
    for wrong in ("gn", "norm=gn", "=x", ""):
        with pytest.raises(SystemExit) as stop:
            main(["runlog", path, "--columns", wrong])
        assert stop.value.code == 2


# ---- 2. all faults, each once --------------------------------------------------------------------------------


def test_six_faults_at_once_are_all_named(tmp_path, capsys):
    rows = healthy()
    rise(rows)
    rows[100]["loss"] = math.nan
    for step in range(250, 700, 50):
        rows[step]["loss"] = 9.0
    for step in range(900, 920):
        rows[step]["grad_norm"] = 50.0
    for row in rows[300:]:
        row["learning_rate"] = 2e-3
    del rows[1200:1250]
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 1e-3\nlr_scheduler_type: constant\n")
    path = str(write_jsonl(tmp_path / "log", rows))
    assert main(["runlog", path, "--config", str(config), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["logs"][0]["findings"]
    rules = [finding["rule"] for finding in found]
    assert len(rules) == len(set(rules))
    wanted = {"nonfinite", "spike-loss", "norm-limit", "schedule", "missing-steps", "rising-loss"}
    assert wanted <= set(rules)
    spikes = next(finding for finding in found if finding["rule"] == "spike-loss")
    assert spikes["steps"] == list(range(250, 700, 50))
    assert "9 in all, at steps 250, 300, 350, 400, 450, …" in spikes["message"]


def test_findings_of_a_watch_are_merged_and_not_found_again(tmp_path):
    rows = healthy(400)
    rows[300]["loss"] = 9.0
    path = write_events(tmp_path / "log", rows)
    emitter = Emitter([sinks.JsonLines(path)])
    for step in (120, 121, 130):
        emitter.finding("norm-above-limit", "too large", step=step, module="blocks.3")
    emitter.finding("spike-loss", "loss is 9", step=300, severity="warning", module="head")
    emitter.close()
    found = {f.rule: f for f in judge_log(read_log(path)).findings}
    assert set(found) == {"watch: norm-above-limit", "watch: spike-loss"}
    assert found["watch: norm-above-limit"].steps == (120, 121, 130)
    assert found["watch: norm-above-limit"].message.startswith("blocks.3: too large; 3 in all")
    assert found["watch: spike-loss"].severity == "warning"


# ---- 3. two curves -------------------------------------------------------------------------------------------


def same(tmp_path, capsys, a, b, *more):
    paths = [str(write_jsonl(tmp_path / name, rows)) for name, rows in (("a", a), ("b", b))]
    code = main(["runlog", *paths, "--same", *more, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_first_step_that_differs(tmp_path, capsys):
    a, b = healthy(300), healthy(300)
    assert same(tmp_path, capsys, a, b)[0] == 0
    for row in b[77:]:
        row["loss"] = math.nextafter(row["loss"], 9)
    code, found = same(tmp_path, capsys, a, b)
    assert (code, found["same"]) == (1, False)
    assert [(f["rule"], f["step"]) for f in found["findings"]] == [("differs-loss", 77)]
    assert f"loss is {a[77]['loss']!r} in the first and {b[77]['loss']!r}" in str(found)
    assert "223 of 300 values differ" in found["findings"][0]["message"]
    assert same(tmp_path, capsys, a, b, "1e-4")[0] == 0
    b[5]["loss"] *= 1 + 2e-4
    code, found = same(tmp_path, capsys, a, b, "1e-4")
    assert (code, found["findings"][0]["step"]) == (1, 5)


def test_steps_curves_and_numbers_that_are_not_finite(tmp_path, capsys):
    a, b = healthy(300), healthy(300)
    a[9]["loss"] = b[9]["loss"] = math.nan
    code, found = same(tmp_path, capsys, a, b[:200])
    assert (code, found["nonfinite"], found["beyond"]) == (0, 1, [100, 0])
    code, found = same(tmp_path, capsys, a, renamed(b, grad_norm="x"))
    assert (code, found["one_sided"]) == (0, ["grad_norm"])
    del b[50:60]
    code, found = same(tmp_path, capsys, a, b)
    assert (code, [f["rule"] for f in found["findings"]]) == (1, ["steps-differ"])
    b = healthy(300)
    code, found = same(tmp_path, capsys, a, b)
    assert (code, found["findings"][0]["step"]) == (1, 9)
    b = healthy(300)
    b[9]["loss"], b[20]["loss"] = math.nan, "high"  # an entry that cannot be read is not equal
    code, found = same(tmp_path, capsys, a, b)
    assert code == 1
    assert {f["rule"] for f in found["findings"]} == {"unreadable", "steps-differ"}


def test_what_cannot_be_compared(tmp_path, capsys):
    path, other = (str(write_jsonl(tmp_path / name, healthy(300))) for name in "ab")
    for wrong in ([path], [path, other, path]):
        assert main(["runlog", *wrong, "--same"]) == 2
    late = str(write_jsonl(tmp_path / "late", healthy(900, first=400)))
    assert main(["runlog", path, late, "--same"]) == 2
    assert "steps in common" in capsys.readouterr().err
    for rows in ([{"loss": 1.0}], renamed(healthy(9), loss="x")):
        assert main(["runlog", path, str(write_jsonl(tmp_path / "no", rows)), "--same"]) == 2
    for wrong in ("-1", "nan", "1", "x"):
        with pytest.raises(SystemExit):
            main(["runlog", path, other, f"--same={wrong}"])


def test_micro_batches_are_compared_in_their_order(tmp_path, capsys):
    def written(name, losses):
        emitter = Emitter([sinks.JsonLines(tmp_path / name)])
        for step, values in enumerate(losses):
            for at, value in enumerate(values):
                emitter.metric("loss", value, step=step, micro_batch=at)
        emitter.close()
        return str(tmp_path / name)

    a = written("a", [(1.0, 2.0)] * 4)
    assert main(["runlog", a, written("b", [(1.0, 2.0)] * 4), "--same"]) == 0
    assert main(["runlog", a, written("c", [(2.0, 1.0)] * 4), "--same"]) == 1
    assert main(["runlog", a, written("d", [(1.0, 2.0)] * 3 + [(1.0,)]), "--same"]) == 1


# ---- 4. pictures and pages -----------------------------------------------------------------------------------


def test_ticks_are_round():
    assert round_ticks(0, 2399, 8) == [0, 500, 1000, 1500, 2000]
    assert round_ticks(0.0001515, 0.00101, 5) == [0.0002, 0.0004, 0.0006, 0.0008, 0.001]
    draw = random.Random(0)
    for _ in range(300):
        low = draw.gauss(0, 1) * 10 ** draw.uniform(-300, 300)
        high = low + abs(draw.gauss(0, 1)) * 10 ** draw.uniform(-300, 300)
        if not low < high < math.inf:
            continue
        found = round_ticks(low, high, 4)
        assert 1 <= len(found) <= 6
        assert all(math.isfinite(value) for value in found)
    for low, high in ((1.0, 1.0), (-1.7e308, 1.7e308), (0.0, 5e-324), (1.0, 1.0 + 2**-52)):
        assert 1 <= len(round_ticks(low, high, 4)) <= 6


def test_numbers_ticks_and_the_page(tmp_path, capsys):
    rows = healthy()
    rows[1832]["loss"], rows[400]["loss"], rows[800]["loss"] = math.nan, 9.0, 9.0
    path = str(write_jsonl(tmp_path / "<b>.jsonl", rows))
    svg, page = tmp_path / "run.svg", tmp_path / "run.html"
    assert main(["runlog", path, "--svg", str(svg), "--html", str(page)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"│ 1 +│ 400 +│ spike-loss", shown)
    assert re.search(r"│ 2 +│ 1832 +│ nonfinite", shown)
    drawn, written = svg.read_text(), page.read_text()
    assert "1. step 400: spike-loss" in drawn
    for tick in ("500", "1,000", "2,000"):
        assert f'text-anchor="middle">{tick}</text>' in drawn
    for text in (drawn, written):
        assert "<b>" not in text
        assert "&lt;b&gt;" in text
    assert "<svg" in written
    assert "<td>" in written
    assert "isobit runlog" in written
    other = str(write_jsonl(tmp_path / "other.jsonl", healthy()))
    assert main(["runlog", path, other, "--html", str(page)]) == 1
    assert page.read_text().count("<svg") == 2
    assert main(["runlog", path, other, "--same", "--html", str(page), "--svg", str(svg)]) == 1
    assert "orange: other.jsonl" in svg.read_text()
    assert "differs-loss" in page.read_text()


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "loss": ' + "[" * 100_000,
        '{"step": 1, "loss": 1' + "0" * 5000 + "}\n" * 3,
        '{"step": 1, "loss": "NaN", "x": "\\u001b[31m"}\n{"step": 2, "loss": 1e999}\n',
        "step,loss," + ",".join(f"c{at}" for at in range(10**5)) + "\n1,2," + "3," * 10**5 + "\n",
        '{"step": 1, "loss": 1.0, "\x1b[31m<script>grad norm": 3.0}\n' * 3,
        '{"step": 99999999999999999999999, "loss": 1}\n{"step": 1, "loss": 2}\n',
    ],
    ids=["deep", "huge", "words", "columns", "escape", "steps"],
)
def test_hostile_logs(text, tmp_path, capsys):
    path, page = tmp_path / "log", tmp_path / "page.html"
    path.write_bytes(text.encode() + b"\xff\xfe\n")
    code = main(["runlog", str(path), "--html", str(page)])
    shown = "".join(capsys.readouterr())
    assert code in (1, 2)
    assert "\x1b[31m" not in shown
    assert "Traceback" not in shown
    assert "<script>" not in (page.read_text() if page.exists() else "")
    assert main(["runlog", str(path), str(path), "--same"]) in (1, 2)
    assert "\x1b[31m" not in "".join(capsys.readouterr())
