"""One metric and one finding arrive in TensorBoard, Weights & Biases (offline) and MLflow (a local store).

The packages take 220 MB, so that `./check --full` installs them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isobit.guards import Emitter, sinks
from tests.guards.test_events import say_something

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # theirs


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    emitter = Emitter([sinks.TensorBoard(tmp_path)])
    say_something(emitter)
    emitter.close()
    assert emitter.lost == {}
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in read.Scalars("isobit/grad.norm")] == [(3, 0.5)]
    assert [s.value for s in read.Scalars("isobit/findings/nonfinite-gradient")] == [2.0]
    (text,) = read.Tensors("isobit/findings/text_summary")
    assert b"head: 2 of 8" in text.tensor_proto.string_val[0]


OFFLINE = """
from isobit.guards import Emitter, sinks
from tests.guards.test_events import say_something

emitter = Emitter([sinks.WeightsAndBiases(project="isobit", mode="offline")])
say_something(emitter)
emitter.close()
assert emitter.lost == {}
"""


def test_weights_and_biases_offline(tmp_path):
    """In a process of its own: the package's service writes the file until the process ends."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, env=environment, check=True)
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for word in (b"isobit/grad.norm", b"isobit/findings/nonfinite-gradient", b"head: 2 of 8"):
        assert word in written


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs mlflow whole, 1 GB
    from mlflow import MlflowClient

    store = tmp_path.as_uri()
    sink = sinks.MLflow(tracking_uri=store)
    emitter = Emitter([sink])
    say_something(emitter)
    emitter.metric("loss", float("nan"), step=4)
    emitter.close()
    assert emitter.lost == {}
    run = MlflowClient(store).get_run(sink.run_id)
    assert run.data.metrics["isobit/grad.norm"] == 0.5
    assert run.data.metrics["isobit/findings/nonfinite-gradient"] == 2
    assert "head: 2 of 8" in run.data.tags["isobit.finding.0"]
