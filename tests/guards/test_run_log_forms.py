"""Logs of trackers and resumed runs: what they have is read, stated and judged; what is damaged is refused.

1. TensorBoard's event files and MLflow's folders and databases: the curves of the run, to the last bit that they keep.
2. A resume, a killed run, NaN as a word: handled and stated; planted faults are found in every form.
3. What is damaged, empty or ambiguous is refused with a remedy, and never read in part.
4. What a run printed: dictionaries of a Trainer, lines of nanoGPT and Megatron.
5. The real packages (`./check --full`): what they write is what is read here.
"""

import json
import math
import re
import sqlite3
import struct

import pytest

from isobit import ArgumentError
from isobit.cli.main import main
from isobit.guards.run_log.readers import masked_crc, read_log
from isobit.guards.run_log.rules import judge_log
from tests.guards.test_run_log import healthy, write_csv, write_jsonl

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
}
KEYS = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}


# ---- writers, by the formats' own definitions ----------------------------------------------------------------


def varint(value):
    value, out = value % 2**64, b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def text(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(data):
    size = struct.pack("<Q", len(data))
    crc = struct.pack("<I", masked_crc(size))
    return size + crc + data + struct.pack("<I", masked_crc(data))


def event(step, tag, value, kind="simple"):
    body = text(1, tag.encode())
    if kind == "simple":
        body += varint(2 << 3 | 5) + struct.pack("<f", value)
    else:  # a tensor, as TensorFlow 2 writes it: dtype, and content or float_val
        packed = struct.pack("<f", value)
        body += text(8, b"\x08\x01" + text(4 if kind == "content" else 5, packed))
    when = varint(1 << 3 | 1) + struct.pack("<d", 1.7e9)
    counted = varint(2 << 3) + varint(step) if step else b""  # proto3 leaves out zeros
    return record(when + counted + text(5, text(1, body)))


def write_tensorboard(folder, rows, name="events.out.tfevents.1700000000.host.1.0", kind="simple"):
    folder.mkdir(exist_ok=True)
    start = varint(1 << 3 | 1) + struct.pack("<d", 1.7e9) + text(3, b"brain.Event:2")
    parts = [record(start)]
    for row in rows:
        parts += [event(row["step"], TAGS[key], row[key], kind) for key in TAGS if key in row]
        parts.append(event(row["step"], "eval/accuracy", 0.5))
    (folder / name).write_bytes(b"".join(parts))
    return folder


def write_mlruns(folder, rows, run="a" * 32, params=()):
    home = folder / "0" / run
    (home / "metrics" / "system").mkdir(parents=True)
    (home / "params").mkdir()
    (home / "meta.yaml").write_text("run_name: x\n")
    for key in KEYS:
        lines = [f"17000000 {row[key]} {row['step']}\n" for row in rows if key in row]
        (home / "metrics" / key).write_text("".join(lines))
    (home / "metrics" / "system" / "cpu").write_text("17000000 1.0 0\n")
    for key, value in dict(params).items():
        (home / "params" / key).write_text(str(value))
    return folder


def write_database(path, rows, runs=("a" * 32,), params=()):
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, name TEXT, lifecycle_stage TEXT, start_time INT);"
            "CREATE TABLE metrics (key TEXT, value REAL NOT NULL, timestamp INT, run_uuid TEXT, step INT, is_nan INT);"
            "CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);"
        )
        for at, run in enumerate(runs):
            database.execute("INSERT INTO runs VALUES (?, ?, 'active', ?)", (run, f"run-{at}", at))
        found = []
        for row in rows:
            for key in KEYS:
                value = row[key]
                stored = (
                    0.0 if math.isnan(value) else max(min(value, 1.7976931348623157e308), -1e300)
                )
                found.append((key, stored, 1, runs[0], row["step"], math.isnan(value)))
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", found)
        database.executemany(
            "INSERT INTO params VALUES (?, ?, ?)",
            [(k, v, runs[0]) for k, v in dict(params).items()],
        )
    database.close()
    return path


WRITERS = {
    "tensorboard": write_tensorboard,
    "tensors": lambda path, rows: write_tensorboard(path, rows, kind="content"),
    "float values": lambda path, rows: write_tensorboard(path, rows, kind="float_val"),
    "mlruns": write_mlruns,
    "database": write_database,
}


def as_float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


# ---- 1. healthy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITERS)
def test_a_healthy_run_in_every_form(form, tmp_path):
    rows = healthy(700)
    log = read_log(WRITERS[form](tmp_path / "run", rows))
    kept = as_float32 if "mlruns" != form != "database" else float
    for curve, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        assert log.curves[curve] == tuple((row["step"], kept(row[key])) for row in rows)
    assert (log.replaced, log.resumed, log.worded, log.numbered) == (0, (), 0, True)
    verdict = judge_log(log)
    assert verdict.findings == ()
    assert {"nonfinite", "norm-limit", "missing-steps", "rising-loss"} <= set(verdict.judged)


# ---- 2. planted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(("value", "rule"), [(math.nan, "nonfinite"), (math.inf, "nonfinite")])
def test_a_number_that_is_not_finite(form, value, rule, tmp_path):
    rows = healthy(300)
    rows[183]["loss"] = value
    found = judge_log(read_log(WRITERS[form](tmp_path / "run", rows))).findings
    assert [(f.rule, f.step) for f in found] == [(rule, 183)]


def test_a_resumed_run_of_tensorboard_is_one_log(tmp_path):
    rows = healthy(400)
    first, second = rows[:250], rows[200:]
    wrong = [row | {"loss": 9.0} for row in first[200:]]  # what was lost in the crash
    write_tensorboard(tmp_path / "run", [*first[:200], *wrong])
    write_tensorboard(tmp_path / "run", second, "events.out.tfevents.1700000999.host.2.0")
    log = read_log(tmp_path / "run")
    assert log.resumed == ((249, 200),)
    assert log.replaced == 3 * 50
    assert [step for step, _ in log.curves["loss"]] == list(range(400))
    found = judge_log(log).findings
    assert [(f.rule, f.step) for f in found] == [("repeated-steps", 200)]  # and no spike of 9.0
    assert "150 earlier ones are not" in found[0].message


def test_what_was_replaced_and_worded_is_stated(tmp_path, capsys):
    rows = healthy(300)
    rows[7]["loss"], rows[9]["grad_norm"] = None, "NaN"
    rows[100:100] = [dict(row) for row in rows[90:100]]
    assert main(["runlog", str(write_jsonl(tmp_path / "a.jsonl", rows))]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 numbers are null or words, and not finite" in shown
    assert "30 entries were logged again, and the later ones count" in shown
    log = read_log(
        write_csv(tmp_path / "b.csv", [{**row, "loss": row["loss"] or "nan"} for row in rows])
    )
    assert (log.worded, log.replaced) == (2, 30)


def test_micro_batches_of_a_watch_are_no_resume(tmp_path):
    lines = [
        {"kind": "metric", "name": "loss", "value": 1.0, "step": step, "micro_batch": part}
        for step in range(5)
        for part in range(2)
    ]
    log = read_log(write_jsonl(tmp_path / "log", lines))
    assert (len(log.curves["loss"]), log.resumed, log.replaced) == (10, (), 0)


def test_a_killed_run_of_tensorboard(tmp_path):
    folder = write_tensorboard(tmp_path / "run", healthy(300))
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    log = read_log(file)
    assert len(log.curves["loss"]) == 300
    assert log.skipped == 300  # 299 of eval/accuracy, and the last record
    assert judge_log(log).is_kept


# ---- 3. refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [3, 9, 30, 500, -30])
def test_a_flipped_bit_is_refused(place, tmp_path):
    folder = write_tensorboard(tmp_path / "run", healthy(100))
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(ArgumentError, match=r"damaged at byte|a log with a loss") as caught:
        read_log(folder)
    assert "remedy" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 40,
        b"\x0a\xff\xff\xff\xff\x0f",
        text(5, text(1, b"\x0f")),
        b"\x80" * 11,
        text(5, b"\x0a\x05a"),
    ],
)
def test_hostile_events_are_refused(data, tmp_path):
    """The checksums are right, and the message is not one."""
    (tmp_path / "x.tfevents.1").write_bytes(record(data))
    with pytest.raises(ArgumentError):
        read_log(tmp_path)


def test_several_runs_must_be_named(tmp_path, capsys):
    rows = healthy(300)
    write_mlruns(tmp_path / "mlruns", rows)
    write_mlruns(tmp_path / "mlruns", rows[:200], run="b" * 32)
    database = write_database(tmp_path / "mlflow.db", rows, runs=("a" * 32, "b" * 32))
    for path in (tmp_path / "mlruns", database):
        assert main(["runlog", str(path)]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "2 of 2 runs" in told
        assert "name it: --run ID" in told
        assert main(["runlog", str(path), "--run", "a" * 32]) == 0
        assert "300 of loss" in capsys.readouterr().out
        assert main(["runlog", str(path), "--run", "none"]) == 2
        capsys.readouterr()
    assert main(["runlog", str(database), "--run", "run-0"]) == 0
    assert main(["runlog", str(tmp_path / "mlruns" / "0" / ("b" * 32))]) == 0
    assert "200 of loss" in capsys.readouterr().out


def test_what_is_no_log_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    database.close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "metrics").mkdir()
    (tmp_path / "link" / "metrics" / "loss").symlink_to("/etc/hostname")
    for name in ("other.db", "empty", "link"):
        with pytest.raises(ArgumentError, match="remedy"):
            read_log(tmp_path / name)


def test_a_deleted_run_is_not_found(tmp_path):
    write_mlruns(tmp_path / "mlruns", healthy(100))
    (tmp_path / "mlruns" / "0").rename(tmp_path / "mlruns" / ".trash")
    with pytest.raises(ArgumentError, match="0 of 0 runs"):
        read_log(tmp_path / "mlruns")


@pytest.mark.parametrize("cut", [100, 2000, -1, -2, -4, -30])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_trainer_state_that_is_cut_is_said_to_be(cut, indent, tmp_path, capsys):
    text = json.dumps({"best_metric": None, "log_history": healthy(100)}, indent=indent)
    path = tmp_path / "trainer_state.json"
    path.write_text(text[:cut])
    assert main(["runlog", str(path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "truncated: the JSON ends within a value" in told
    assert "checkpoint-…/trainer_state.json" in told
    path.write_text(text.replace(":", ";", 1))
    assert main(["runlog", str(path)]) == 2
    assert "is no JSON" in " ".join(capsys.readouterr().err.split())


def test_a_log_that_does_not_exist(tmp_path, capsys):
    assert main(["runlog", str(tmp_path / "none")]) == 2
    assert "remedy" in capsys.readouterr().err


# ---- 4. printed text -----------------------------------------------------------------------------------------

PRINTED = {
    "a Trainer": lambda r: f"{{'loss': {r['loss']}, 'grad_norm': {r['grad_norm']}, 'epoch': 0.1}}",
    "a Trainer with words": lambda r: (
        f" 5%|█ | 1/9 [00:1]\r{{'loss': '{r['loss']}', 'grad_norm': '{r['grad_norm']}'}}"
    ),
    "nanoGPT": lambda r: f"iter {r['step']}: loss {r['loss']}, grad norm {r['grad_norm']}, mfu 3%",
    "Megatron": lambda r: (
        f" [2026-11-20] iteration  {r['step']}/ 500 | lm loss: {r['loss']:.17E} | "
        f"grad norm: {r['grad_norm']} | number of skipped iterations: 0 |"
    ),
}


@pytest.mark.parametrize("form", PRINTED)
def test_printed_text_is_read(form, tmp_path, capsys):
    rows = healthy(200)
    rows[150]["loss"] = math.nan
    head = "Loading checkpoint shards: 100%\nstep 0: train loss 4.1, val loss 4.2\n"
    lines = [f"{PRINTED[form](row)}\nsaving, step by step\n" for row in rows]
    path = tmp_path / "stdout.log"
    path.write_text(head + "".join(lines))
    log = read_log(path)
    assert (log.form, log.numbered) == ("text", "Trainer" not in form)
    assert repr(list(log.curves["loss"])) == repr([(row["step"], row["loss"]) for row in rows])
    assert log.curves["grad_norm"] == tuple((row["step"], row["grad_norm"]) for row in rows)
    verdict = judge_log(log)
    assert [(one.rule, one.step) for one in verdict.findings] == [("nonfinite", 150)]
    assert "before clipping" in verdict.not_judged["norm-limit"]
    lines[150] = re.sub("(?i)nan", "tensor(nan)", lines[150])
    path.write_text(head + "".join(lines))
    found = judge_log(read_log(path)).findings
    assert [one.rule for one in found if one.rule != "missing-steps"] == ["unreadable"]


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': }\n",
        "{'" * 5000,
        "{'loss': " + "-" * 20_000,
        "iter 1: " + "loss " * 1900,
        "{'loss'",
    ],
)
def test_hostile_text_is_refused(text, tmp_path):
    (tmp_path / "log").write_text(f"started\n{text}")
    with pytest.raises(ArgumentError, match="a log with a loss"):
        read_log(tmp_path / "log")


# ---- 5. the packages -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_what_the_package_tensorboard_writes(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    rows = healthy(120)
    rows[60]["loss"] = math.nan
    with SummaryWriter(tmp_path) as writer:
        writer.add_text("note", "x")
        for row in rows:
            for key, tag in TAGS.items():
                writer.add_scalar(tag, row[key], row["step"], new_style=row["step"] % 2 == 0)
    log = read_log(tmp_path)
    assert len(log.curves["loss"]) == 120
    assert log.curves["grad_norm"] == tuple((r["step"], as_float32(r["grad_norm"])) for r in rows)
    assert [f.step for f in judge_log(log).findings] == [60]


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_what_the_package_mlflow_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs mlflow whole, 1 GB
    from mlflow import MlflowClient

    client = MlflowClient(tmp_path.as_uri())
    run = client.create_run(client.create_experiment("x"))
    client.log_param(run.info.run_id, "learning_rate", "0.001")
    for row in healthy(30):
        client.log_metric(run.info.run_id, "train/loss", row["loss"], step=row["step"])
    client.log_metric(run.info.run_id, "train/loss", math.nan, step=30)
    log = read_log(tmp_path)
    assert len(log.curves["loss"]) == 31
    assert log.config == {"learning_rate": "0.001"}
    assert [f.rule for f in judge_log(log).findings] == ["nonfinite"]


def test_the_curves_of_a_database_are_in_json(tmp_path, capsys):
    path = write_database(tmp_path / "mlflow.db", healthy(300), params={"learning_rate": "0.001"})
    assert main(["runlog", str(path), "--json"]) == 0
    (log,) = json.loads(capsys.readouterr().out)["logs"]
    assert (log["form"], log["entries"]["loss"], log["replaced"]) == ("mlflow", 300, 0)
