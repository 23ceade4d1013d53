"""One metric and one finding arrive at real servers on this machine: MLflow's, over HTTP, and Prometheus, by a scrape.

`./check --full` installs MLflow whole in .venv-mlflow; the package `prometheus` of Debian or another distribution is
installed by hand. Without them these tests are skipped, with what to install.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from isobit.guards import Emitter, sinks
from tests.guards.test_events import say_something

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # theirs
PATIENCE = 300  # seconds until a server must answer


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(address, **query):
    with urlopen(f"{address}?{urlencode(query)}", timeout=10) as answer:
        return answer.read()


def wait_for(condition):
    """Return the first true answer; errors of a server that starts are expected."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            answer = condition()
        except (URLError, ConnectionError, TimeoutError):
            answer = None
        if answer:
            return answer
        assert time.monotonic() < end, "no answer"
        time.sleep(0.5)


@pytest.fixture
def start(tmp_path):
    """Start programs, and end them after the test."""
    running = []

    def run(*words):
        with open(tmp_path / "server.log", "w") as log:
            running.append(
                subprocess.Popen(
                    words,
                    cwd=tmp_path,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that its workers end with it
                )
            )

    yield run
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)  # what it has written is of no use
        process.wait(PATIENCE)


def test_mlflow_server(tmp_path, start):
    program = ROOT / ".venv-mlflow" / "bin" / "mlflow"
    if not program.exists():
        pytest.skip(
            "needs MLflow whole: python3 -m venv .venv-mlflow, and pip install mlflow there"
        )
    port = free_port()
    store = f"sqlite:///{tmp_path}/store.db"
    options = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    start(str(program), "server", *options, "--backend-store-uri", store)
    server = f"http://127.0.0.1:{port}"
    wait_for(lambda: ask(f"{server}/health"))
    sink = sinks.MLflow(tracking_uri=server)
    emitter = Emitter([sink])
    say_something(emitter)
    emitter.close()
    assert emitter.lost == {}
    answer = ask(f"{server}/api/2.0/mlflow/runs/get", run_id=sink.run_id)
    data = json.loads(answer)["run"]["data"]
    metrics = {metric["key"]: (metric["value"], metric["step"]) for metric in data["metrics"]}
    assert metrics["isobit/grad.norm"] == (0.5, 3)
    assert metrics["isobit/findings/nonfinite-gradient"][0] == 2
    tags = {tag["key"]: tag["value"] for tag in data["tags"]}
    assert "head: 2 of 8" in tags["isobit.finding.0"]


def test_prometheus_scrapes(tmp_path, start):
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs the program prometheus: apt-get install prometheus")
    sink = sinks.Prometheus(port=0)
    emitter = Emitter([sink], run="run 1")
    say_something(emitter)
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        "- job_name: training\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{sink.port}']}}]\n"
    )
    port = free_port()
    start(
        program,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )

    def query(name):
        answer = json.loads(ask(f"http://127.0.0.1:{port}/api/v1/query", query=name))
        return answer["data"]["result"]

    (norm,) = wait_for(lambda: query("isobit_grad_norm"))
    assert (norm["metric"]["run"], norm["value"][1]) == ("run 1", "0.5")
    (finding,) = wait_for(lambda: query("isobit_findings_total"))
    assert (finding["metric"]["rule"], finding["value"][1]) == ("nonfinite-gradient", "1")
    assert query("time() - isobit_last_step_timestamp_seconds < 600")
    emitter.close()
    assert emitter.lost == {}
