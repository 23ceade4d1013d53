"""One record reaches every sink with its fields; a sink that fails is reported, and costs the others nothing.

1. The record: what it says, and its JSON.
2. logging, JSON lines, and objects with `log`, `log_metrics` or `emit`.
3. Prometheus, scraped over HTTP, and OpenTelemetry with an SDK in memory: the real packages.
4. What fails: a sink that raises, a package that is not installed, an object that is no sink.
TensorBoard, Weights & Biases and MLflow are in test_tracker_packages.py.
"""

import json
import logging
import subprocess
import sys
import threading
import urllib.request

import pytest

from isobit import ArgumentError
from isobit.guards import Emitter, Event, sinks


def say_something(emitter):
    emitter.metric("grad.norm", 0.5, step=3)
    emitter.finding("nonfinite-gradient", "2 of 8", step=3, micro_batch=1, module="head", value=2)


# ---- 1. the record -----------------------------------------------------------------------------------------


def test_the_record_on_one_line_and_as_json():
    event = Event("finding", "rule", step=3, micro_batch=1, rank=2, module="a\nb", message="bad")
    assert str(event) == "step 3, micro-batch 1, rank 2: rule: a b: bad"
    for value, name in ((float("nan"), "NaN"), (float("inf"), "Infinity")):
        fields = Event("metric", "loss", value).as_dict()
        assert json.loads(json.dumps(fields, allow_nan=False))["value"] == name
    assert Event("metric", "loss", 0.0, step=0).as_dict()["value"] == 0.0


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ArgumentError):
        Emitter([]).emit(Event("note", "x"))


# ---- 2. logging, lines, objects ----------------------------------------------------------------------------


def test_logging_is_the_default_and_has_the_event(caplog):
    with caplog.at_level(logging.DEBUG, "isobit.guards"):
        say_something(Emitter(run="r", rank=5))
    metric, finding = caplog.records
    assert (metric.levelno, finding.levelno) == (logging.DEBUG, logging.ERROR)
    assert finding.getMessage() == "step 3, micro-batch 1, rank 5: nonfinite-gradient: head: 2 of 8"
    assert (finding.event.run, finding.event.rank, finding.event.module) == ("r", 5, "head")
    assert finding.event.time > 1e9


def test_json_lines(tmp_path):
    emitter = Emitter([sinks.JsonLines(tmp_path / "events.jsonl")], run="r", rank=1)
    threads = [threading.Thread(target=say_something, args=(emitter,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()
    lines = [json.loads(s) for s in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    finding = next(line for line in lines if line["kind"] == "finding")
    assert {name: finding[name] for name in finding if name != "time"} == {
        "kind": "finding",
        "name": "nonfinite-gradient",
        "value": 2,
        "severity": "error",
        "run": "r",
        "step": 3,
        "micro_batch": 1,
        "rank": 1,
        "module": "head",
        "message": "2 of 8",
    }


def test_objects_that_log_dictionaries():
    got = []

    class Logs:
        def log(self, values, step):
            got.append((values, step))

    class LogsMetrics:
        def log(self, message):
            raise AssertionError("log_metrics is preferred")

        def log_metrics(self, values, step):
            got.append((values, step))

    class Emits:
        def emit(self, event):
            got.append(event.name)

    emitter = Emitter([Logs(), LogsMetrics(), Emits()])
    say_something(emitter)
    emitter.close()
    metric, finding = {"isobit/grad.norm": 0.5}, {"isobit/findings/nonfinite-gradient": 2}
    assert got == [(metric, 3)] * 2 + ["grad.norm"] + [(finding, 3)] * 2 + ["nonfinite-gradient"]


# ---- 3. real packages --------------------------------------------------------------------------------------


def test_prometheus_is_scraped():
    sink = sinks.Prometheus(port=0)
    emitter = Emitter([sink], run="r", rank=1)
    say_something(emitter)
    emitter.metric("weight.norm", 1.0, module="head")  # no series per module
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        text = answer.read().decode()
    emitter.close()
    assert 'isobit_grad_norm{rank="1",run="r"} 0.5' in text
    labels = 'rank="1",rule="nonfinite-gradient",run="r",severity="error"'
    assert f"isobit_findings_total{{{labels}}} 1.0" in text
    assert 'isobit_last_step_timestamp_seconds{rank="1",run="r"}' in text
    assert "weight" not in text
    assert emitter.lost == {}


def test_opentelemetry_in_memory():
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    emitter = Emitter([sinks.OpenTelemetry(MeterProvider([reader]), tracers)], run="r")
    say_something(emitter)
    emitter.close()
    assert emitter.lost == {}
    scope = reader.get_metrics_data().resource_metrics[0].scope_metrics[0]
    points = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
    assert scope.scope.name == "isobit"
    assert points["isobit.grad.norm"].value == 0.5
    assert points["isobit.findings"].value == 1
    assert points["isobit.findings"].attributes["rule"] == "nonfinite-gradient"
    finding, run = spans.get_finished_spans()
    assert (finding.name, run.name) == ("isobit.finding nonfinite-gradient", "isobit.run")
    assert finding.parent.span_id == run.context.span_id
    assert finding.attributes["isobit.module"] == "head"


def test_opentelemetry_without_an_sdk_does_nothing():
    emitter = Emitter([sinks.OpenTelemetry()])
    say_something(emitter)
    emitter.close()
    assert emitter.lost == {}


# ---- 4. what fails -----------------------------------------------------------------------------------------


def test_a_sink_that_raises_is_reported_once_and_counted(caplog, tmp_path):
    class Broken:
        def emit(self, event):
            raise OSError("disk is full")

    lines = sinks.JsonLines(tmp_path / "events.jsonl")
    emitter = Emitter([Broken(), lines])
    say_something(emitter)
    emitter.close()
    assert emitter.lost == {0: 2}
    assert sum("does not take events" in record.message for record in caplog.records) == 1
    assert "disk is full" in caplog.text
    assert "lost 2 events" in caplog.text
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("wrong", ["events.jsonl", 3, object()])
def test_what_is_no_sink_is_refused(wrong):
    with pytest.raises(ArgumentError, match="an object with emit"):
        Emitter([wrong])


def test_nothing_is_imported_unless_asked():
    code = (
        "import sys\nfrom isobit.guards import Emitter, sinks\nfrom isobit import ArgumentError\n"
        "sys.modules.update(dict.fromkeys(['wandb', 'mlflow', 'tensorboard', 'prometheus_client']))\n"
        "Emitter().metric('loss', 1.0)\n"
        "assert not {'torch', 'opentelemetry'} & set(sys.modules)\n"
        "for make in (sinks.WeightsAndBiases, sinks.MLflow, sinks.Prometheus):\n"
        "    try:\n        make()\n    except ArgumentError as error:\n        assert 'pip install' in str(error)\n"
        "    else:\n        raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
