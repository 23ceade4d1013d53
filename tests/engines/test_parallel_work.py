"""Theorem: what is judged does not depend on where it runs, and shared evidence loses nothing.

Tests that start a cluster of Ray or a server of S3 are marked full, and need the extras ray and s3.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import isobit
from isobit.cli.main import main
from isobit.contracts.store.sharing import Store, is_whole, pull, push
from isobit.errors import BusyError
from isobit.foundation.addresses import storage_of
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


def test_errors_of_workers_arrive_as_they_were_raised():
    words = {"expected": "a", "received": "b", "remedy": "c"}
    for error in (isobit.ArgumentError(**words), BusyError(**words, ranks=[3], stacks={3: ["x"]})):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
        assert vars(found) == vars(error)


def test_a_killed_process_is_no_finding(tmp_path, capsys):
    """Exit code 1 would mean that the script has a fault."""
    script = tmp_path / "killed.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    words = ["simulate", str(script), "--ranks", "2", "--seeds", "2", "--jobs", "2", "-q"]
    assert main(words) == 2
    assert "use fewer --jobs if memory ran out" in capsys.readouterr().err


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


@pytest.mark.full
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
    with open(Path(home).with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            words, env=clean_environment(), cwd=Path(home).parent, stdout=log, stderr=log
        )


def note(what, home, local):
    """Print what was done to a run, and what was found after it."""
    found = records_of(home)
    print(f"\n{what}: {sum(map(len, found.values()))} records of {len(found)} claims", end="")
    print(
        f", {sum(map(len, local.values()))} of {len(local)} in a local run; equal: {found == local}"
    )


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
def test_seeds_and_layouts_on_dask_are_those_of_one_process(tmp_path):
    distributed = pytest.importorskip("distributed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    seeds = ["simulate", str(script), "--ranks", "2", "--seeds", "3"]
    layouts = ["gate", "training", "--workload", "tiny", "--layouts", "1x1x1", "2x2x1"]
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        for words, key in ((seeds, "clean_seeds"), (layouts, "verdicts")):
            found = []
            for more in ([], ["--on", f"dask:{cluster.scheduler_address}"]):
                command = [sys.executable, "-m", "isobit", *words, "--json", "-q", *more]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                found.append(json.loads(done.stdout)[key])
            assert found[0] == found[1]


@pytest.mark.full
def test_a_command_as_a_job_of_submitit_finds_what_one_process_does(tmp_path):
    """As docs/explanation/scale.md has it, on submitit's local executor instead of Slurm."""
    submitit = pytest.importorskip("submitit")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "isobit", "simulate", str(script), "--ranks", "2"]
    command += ["--seeds", "3", "--json", "-q"]
    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(submitit.helpers.CommandFunction(command, verbose=False))
    here = subprocess.run(command, capture_output=True, text=True)
    records = [json.loads(text) for text in (job.result(), here.stdout)]
    for record in records:
        record.pop("provenance")
    assert records[0] == records[1]
    assert records[0]["clean_seeds"] == [0, 1, 2]


@pytest.mark.full
def test_layouts_on_ray_are_those_of_one_process(cluster, tmp_path):
    found = []
    for more in ([], ["--on", f"ray:{cluster.address}"]):
        words = [sys.executable, "-m", "isobit", "gate", "training", "--workload", "tiny"]
        words += ["--layouts", "1x1x1", "2x2x1", "--json", "-q", *more]
        done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        found.append((record["verdicts"], [one["digest"] for one in record["outcomes"]]))
    assert found[0] == found[1]


@pytest.mark.full
def test_a_killed_worker_loses_nothing(cluster, local, tmp_path):
    running = start_verify(cluster, tmp_path / "home")
    killed = wait_for_workers()[0]
    os.kill(killed, signal.SIGKILL)
    assert running.poll() is None
    assert running.wait(300) == 0
    assert killed not in workers()
    note(f"kill -9 of worker {killed}", tmp_path / "home", local)
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
    note(f"kill -9 of the driver after {len(kept)} of {len(FEW)} contracts", home, local)
    assert records_of(home) == local  # each record once


@pytest.mark.full
def test_two_drivers_at_once(cluster, local, tmp_path):
    url = str(tmp_path / "shared")
    both = [start_verify(cluster, tmp_path / f"home{k}", "--store", url) for k in range(2)]
    assert [one.wait(400) for one in both] == [0, 0]
    found = records_of(url)
    note("two drivers at once, their store", url, local)
    words = [sys.executable, "-m", "isobit", "verify", *FEW, "--level", "L2", "-q", "--store", url]
    third = [*words, "--evidence", str(tmp_path / "home2")]
    done = subprocess.run(third, cwd=tmp_path, capture_output=True, text=True)
    assert "0 judged now" in done.stdout
    assert f"{len(local)} of {len(local)} claims" in done.stdout  # each counts once
    assert found.keys() == local.keys()
    assert all(one in local[key] for key, ones in found.items() for one in ones)


@pytest.mark.full
def test_a_killed_node_loses_nothing(cluster, local, tmp_path):
    running = start_verify(cluster, tmp_path / "home")
    busy = {parent_of(worker) for worker in wait_for_workers()}
    node = next(node for node in cluster.nodes_added if raylet_of(node) in busy)
    cluster.nodes_added.remove(node)
    cluster.remove_node(node, allow_graceful=False)  # kill -9 of its processes
    assert running.poll() is None
    cluster.nodes_added.append(cluster.add_node(num_cpus=1))
    assert running.wait(400) == 0
    note("kill -9 of a node that ran a task", tmp_path / "home", local)
    assert records_of(tmp_path / "home") == local


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def raylet_of(node):
    return node.all_processes["raylet"][0].process.pid


class Bucket:
    """A server of S3 that can be stopped and started again with what it has: moto's, in this process."""

    def __init__(self):
        self.port = 0
        self.start()

    def start(self):
        from moto.server import ThreadedMotoServer

        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    def stop(self):
        self.server.stop()


URL = "s3://bucket/evidence"


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    import s3fs

    made = Bucket()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    storage_of.cache_clear()
    made.files = s3fs.S3FileSystem()
    if made.files.exists("s3://bucket"):
        made.files.rm("s3://bucket", recursive=True)
    made.files.mkdir("s3://bucket")
    yield made
    made.stop()


def verify_with_store(home, *more):
    words = [sys.executable, "-m", "isobit", "verify", *FEW, "--level", "L2", "-q", "--store", URL]
    words += ["--evidence", str(home), *more]
    return subprocess.run(words, cwd=Path(home).parent, capture_output=True, text=True)


@pytest.mark.full
def test_evidence_in_s3_and_a_torn_object(bucket, local, tmp_path):
    for home in ("one", "two"):  # the second takes what the first put
        done = verify_with_store(tmp_path / home)
        assert done.returncode == 0, done.stderr
    assert "0 judged now" in done.stdout
    store = Store(URL)
    assert pull(store, tmp_path / "three") == len(FEW)
    assert records_of(tmp_path / "three") == local
    torn = sorted(store.names())[0]
    store.write(torn, store.read(torn)[:200])
    done = verify_with_store(tmp_path / "four")  # does not count it, and judges that contract
    assert done.returncode == 0, done.stderr
    assert "1 judged now" in done.stdout
    note("a torn object in S3", tmp_path / "four", local)
    assert records_of(tmp_path / "four") == local
    assert push(store, tmp_path / "one" / "evidence") == 1  # whoever has it puts it right
    assert is_whole(torn, store.read(torn))
    assert all(is_whole(name, store.read(name)) for name in store.names())


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3, 300])
def test_storage_that_does_not_answer(bucket, cluster, local, tmp_path, seconds):
    """For a while, or until the run has ended: then the next run puts what this one judged."""
    home = tmp_path / "home"
    running = start_verify(cluster, home, "--store", URL)
    wait_for_workers()
    bucket.stop()
    end = time.monotonic() + 300
    while not records_of(home) and time.monotonic() < end:
        time.sleep(0.1)
    if seconds == 3:
        time.sleep(seconds)
        bucket.start()
        assert running.wait(300) == 0
    else:
        assert running.wait(300) == 2
        assert "kept in the local folder" in home.with_suffix(".log").read_text()
        assert records_of(home) == local
        bucket.start()
        done = verify_with_store(home)
        assert done.returncode == 0, done.stderr
        assert "0 judged now" in done.stdout
    assert pull(Store(URL), tmp_path / "other") == len(FEW)
    note(f"S3 unreachable for {seconds} s, its objects", tmp_path / "other", local)
    assert records_of(home) == records_of(tmp_path / "other") == local
