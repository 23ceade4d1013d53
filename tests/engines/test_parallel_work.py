"""Theorem: what is judged does not depend on where it runs, and shared evidence loses nothing.

Tests that start a cluster of Ray or a server of S3 are marked full, and need the extras ray and s3.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import isobit
from isobit.cli.main import main
from isobit.contracts.store.sharing import Store, is_whole, pull, push
from isobit.foundation.engines import open_engine

FEW = [
    "rank-agreement-v1",
    "rollout-summary-v1",
    "tolerance-table-v1",
]  # quick, without dependencies
SHORT = ["rank-agreement-v1"]


def verify(home, *more, which=SHORT):
    return main(["verify", *which, "--level", "L2", "--evidence", str(home), "-q", *more])


def records_of(folder):
    """Every record of every file but its times, by contract and claim."""
    found = {}
    for path in Path(folder).rglob("*.jsonl"):
        header, *lines = map(json.loads, path.read_text().splitlines())
        for line in lines:
            for name in ("seconds", "previous"):
                del line[name]
            key = header["contract"], line["claim"], header["digest"], header["machine"]
            found.setdefault(key, []).append(line)
    return found


def test_an_engine_that_does_not_exist_is_refused(tmp_path, capsys):
    with pytest.raises(isobit.ArgumentError, match="ray"):
        open_engine("slurm")
    assert main(["verify", *SHORT, "--on", "slurm", "--evidence", str(tmp_path)]) == 2
    assert "isobit[ray]" in capsys.readouterr().err


def test_rollouts_in_processes_are_those_of_one_pass(tmp_path, capsys):
    for name, spoil in (("a", 0.0), ("b", 1e-3)):
        (tmp_path / name).mkdir()
        for part in range(2):
            lines = [
                {"token_ids": [k, 1, 2], "logprobs": [-1.0 - k, -0.5 + spoil / (k + 1), -0.25]}
                for k in range(5)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / name / f"{part}.jsonl").write_text(text)
    found = []
    for more in ([], ["--jobs", "2"]):
        words = ["compare", "rollouts", str(tmp_path / "a"), str(tmp_path / "b"), "--json", *more]
        assert main(words) == 1
        record = json.loads(capsys.readouterr().out)
        record.pop("provenance")
        found.append(record)
    assert found[0] == found[1]
    assert found[0]["sequences"] == 10
    (tmp_path / "b" / "2.jsonl").write_text("")
    assert main([*words]) == 2
    assert "as many files" in capsys.readouterr().err


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2) * dist.get_rank()
dist.all_reduce(x)
print(x.tolist())
"""


def test_seeds_in_processes_are_those_of_one(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = []
    for more in ([], ["--jobs", "2"]):
        words = ["simulate", str(script), "--ranks", "2", "--seeds", "2", "--json", "-q", *more]
        assert main(words) == 0
        record = json.loads(capsys.readouterr().out)
        record.pop("provenance")
        found.append(record)
    assert found[0] == found[1]
    assert found[0]["clean_seeds"] == [0, 1]


NAME = f"ab/{'a' * 32}-{{}}.jsonl"


def evidence_file(text):
    from blake3 import blake3

    return NAME.format(blake3(text).hexdigest()[:32]), text + b"\n"


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_two_writers_lose_nothing_and_torn_files_are_put_right(kind, tmp_path):
    url = str(tmp_path / "shared") if kind == "folder" else f"memory://{tmp_path.name}/shared"
    store = Store(url)
    homes = [tmp_path / "one", tmp_path / "two"]
    files = [evidence_file(f'{{"of": {k}}}'.encode()) for k in range(4)]
    for home, mine in zip(homes, (files[:3], files[2:]), strict=True):
        for name, data in mine:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(data)
    assert (push(store, homes[0]), push(store, homes[1])) == (3, 1)
    assert store.names() == {name for name, _ in files}
    store.write(files[0][0], files[0][1][:4])  # torn
    assert not is_whole(files[0][0], store.read(files[0][0]))
    assert pull(store, tmp_path / "three") == 3
    assert push(store, homes[0]) == 1
    assert pull(store, tmp_path / "three") == 1
    assert all((tmp_path / "three" / name).read_bytes() == data for name, data in files)


def test_a_store_that_does_not_answer_names_the_remedy(monkeypatch):
    from isobit.contracts.store import sharing

    monkeypatch.setattr(sharing, "WAITS", (0.0, 0.0))
    tries = []

    class Storage:
        def find(self, *_, **__):
            tries.append(1)
            raise ConnectionError("no route")

        def _strip_protocol(self, text):
            return text

    monkeypatch.setattr(sharing.Address, "storage", Storage())
    with pytest.raises(isobit.ArgumentError, match="kept in the local folder"):
        Store("memory://nowhere/x").names()
    assert len(tries) == 3


def test_status_of_a_store_is_a_matrix_of_engines(tmp_path, capsys):
    url = str(tmp_path / "shared")
    assert verify(tmp_path / "home", "--store", url) == 0
    capsys.readouterr()
    assert main(["contract", "status", "isobit", "--store", url, "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert len(record["engines"]) == 1
    assert record["contracts"]["rank-agreement-v1"] == {record["engines"][0]: "kept L2"}
    other = tmp_path / "other"
    assert (
        main(["verify", *SHORT, "--level", "L2", "--evidence", str(other), "-q", "--store", url])
        == 0
    )
    assert "0 judged now" in capsys.readouterr().out  # the evidence came from the store
    torn = next(Path(url).rglob("*.jsonl"))
    torn.write_bytes(torn.read_bytes()[:100])
    assert main(["contract", "status", *SHORT, "--store", url]) == 2


# ---- a cluster and a server -----------------------------------------------------------------------------


def clean_environment():
    return os.environ | {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    made.nodes_added = [made.add_node(num_cpus=1) for _ in range(2)]
    yield made
    made.shutdown()


def start_verify(cluster, home, *more):
    words = [sys.executable, "-m", "isobit", "verify", *FEW, "--level", "L2", "-q"]
    words += ["--evidence", str(home), "--on", f"ray:{cluster.address}", *more]
    return subprocess.Popen(words, env=clean_environment(), cwd=Path(home).parent)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    home = tmp_path_factory.mktemp("local") / "home"
    words = [sys.executable, "-m", "isobit", "verify", *FEW, "--level", "L2", "-q"]
    assert subprocess.run([*words, "--evidence", str(home)], cwd=home.parent).returncode == 0
    return records_of(home)


def workers():
    """Processes of Ray that run a task of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::call_with_path" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for_workers():
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if found := workers():
            return found
        time.sleep(0.2)
    raise AssertionError("no task started")


@pytest.mark.full
def test_evidence_on_three_nodes_is_that_of_a_local_run(cluster, local, tmp_path):
    assert start_verify(cluster, tmp_path / "home").wait(300) == 0
    assert records_of(tmp_path / "home") == local


@pytest.mark.full
def test_seeds_on_ray_are_those_of_one_process(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = []
    for more in ([], ["--on", f"ray:{cluster.address}"]):
        words = [sys.executable, "-m", "isobit", "simulate", str(script), "--ranks", "2"]
        words += ["--seeds", "3", "--json", "-q", *more]
        done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        record.pop("provenance")
        found.append(record)
    assert found[0] == found[1]


@pytest.mark.full
def test_a_killed_worker_loses_nothing(cluster, local, tmp_path):
    running = start_verify(cluster, tmp_path / "home")
    os.kill(wait_for_workers()[0], signal.SIGKILL)
    assert running.wait(300) == 0
    assert records_of(tmp_path / "home") == local


@pytest.mark.full
def test_a_killed_driver_leaves_what_was_judged_and_the_next_ends_it(cluster, local, tmp_path):
    home = tmp_path / "home"
    running = start_verify(cluster, home)
    end = time.monotonic() + 200
    while not records_of(home) and running.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    running.kill()
    running.wait()
    kept = set(home.rglob("*.jsonl"))
    assert kept
    assert start_verify(cluster, home).wait(300) == 0
    assert kept <= set(home.rglob("*.jsonl"))
    assert records_of(home) == local  # each record once


@pytest.mark.full
def test_two_drivers_at_once(cluster, local, tmp_path):
    url = str(tmp_path / "shared")
    both = [start_verify(cluster, tmp_path / f"home{k}", "--store", url) for k in range(2)]
    assert [one.wait(400) for one in both] == [0, 0]
    found = records_of(url)
    assert found.keys() == local.keys()
    assert all(one in local[key] for key, ones in found.items() for one in ones)


@pytest.mark.full
def test_a_killed_node_loses_nothing(cluster, local, tmp_path):
    running = start_verify(cluster, tmp_path / "home")
    wait_for_workers()
    cluster.remove_node(cluster.nodes_added.pop(), allow_graceful=False)
    assert running.wait(400) == 0
    assert records_of(tmp_path / "home") == local


@pytest.mark.full
def test_evidence_in_s3(local, tmp_path, monkeypatch):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
    ):
        monkeypatch.setenv(name, value)
    try:
        fsspec.filesystem("s3").mkdir("s3://bucket")
        store = Store("s3://bucket/evidence")
        words = [sys.executable, "-m", "isobit", "verify", *FEW, "--level", "L2", "-q"]
        words += ["--store", "s3://bucket/evidence"]
        for home in ("one", "two"):  # the second takes what the first put
            done = subprocess.run(
                [*words, "--evidence", str(tmp_path / home)],
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
        assert "0 judged now" in done.stdout
        assert pull(store, tmp_path / "three") == len(list((tmp_path / "one").rglob("*.jsonl")))
        assert records_of(tmp_path / "three") == local
    finally:
        server.stop()
