"""A run that is killed anywhere in a step or a checkpoint resumes at another layout with the bits of a whole run.

What was half written is never loaded: a folder has its name only when it is complete, and every file has a digest.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isobit import ArgumentError
from isobit.parallel import checkpoint
from isobit.simulator import World
from tests.attacks import killed_run
from tests.attacks.small_net import Net

WORKER = Path(killed_run.__file__)
ROOT = WORKER.parents[2]


@pytest.fixture(scope="module")
def whole():
    """The digest of a run on one rank that nobody stopped."""
    return killed_run.train(None, (1,), 1)


def run_and_kill(folder, shape, micro_batches, place):
    """Start the ranks, wait until all have ended, and return their exit codes and the newest checkpoint."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A rank whose peer is gone must not wait for minutes.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [folder / "store", folder, micro_batches, place, *shape]
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), *map(str, words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(math.prod(shape))
    ]
    codes = []
    try:
        for one in started:
            printed, _ = one.communicate(timeout=240)
            assert printed == b"", "a rank finished its run although another was killed"
            codes.append(one.returncode)
    finally:
        for one in started:
            one.kill()
    found = [p for p in folder.glob("step-*") if not p.name.endswith(".partial")]
    return codes, max(found, key=lambda p: p.name)


def resumed(newest, shape, micro_batches):
    """The digests of all simulated ranks that resume from a checkpoint."""

    def rank(_):
        return killed_run.train(None, shape, micro_batches, resume=newest)

    return set(World(math.prod(shape)).run(rank).values)


PLACES = [
    pytest.param((2,), 2, "exchange"),
    pytest.param((2,), 1, "data file", marks=pytest.mark.full),
    pytest.param((1,), 4, "record"),
    pytest.param((2,), 2, "micro-batch", marks=pytest.mark.full),
    pytest.param((2,), 2, "metadata", marks=pytest.mark.full),
    pytest.param((2,), 2, "record", marks=pytest.mark.full),
    pytest.param((2,), 2, "rename", marks=pytest.mark.full),
]
PLACES_IN_LEVELS = [
    ((2, 2), 2, "message across hosts"),
    ((2, 2), 1, "message in a host"),
    ((2, 2), 1, "sums on their way back"),
    ((2, 2, 2), 1, "message across racks"),
    ((2, 2), 2, "micro-batch"),
    ((2, 2), 1, "data file"),
    ((2, 2), 1, "record"),
]
LAYOUTS = [((4,), 2), ((2, 2), 1), ((2, 2), 2), ((2, 4), 1), ((4, 2), 1), ((2, 2, 2), 1)]


def check_resumed(folder, whole, codes, newest, layouts):
    """Require a killed rank, no rank that went on, and the bits of a whole run from the checkpoint before."""
    assert -signal.SIGKILL in codes
    assert 0 not in codes
    assert newest.name == "step-2"  # the third was not finished
    for shape, micro_batches in layouts:
        assert resumed(newest, shape, micro_batches) == {whole}, (shape, micro_batches)
    assert killed_run.train(None, (1,), 8, resume=newest) == whole
    # The next run saves over what was left.
    assert killed_run.train(folder, (1,), 2, resume=newest) == whole
    assert (folder / "step-4").is_dir()
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(("shape", "micro_batches", "place"), PLACES)
@pytest.mark.sweep(1)
def test_a_killed_run_resumes_at_another_layout(tmp_path, whole, shape, micro_batches, place):
    codes, newest = run_and_kill(tmp_path, shape, micro_batches, place)
    if (half := tmp_path / "step-3.partial").exists() and place != "rename":
        with pytest.raises(ArgumentError, match="never finished"):
            checkpoint.load(half, Net(killed_run.torch.float32))
    check_resumed(tmp_path, whole, codes, newest, LAYOUTS[:2])


@pytest.mark.full  # half a minute each: four processes or eight, and six layouts
@pytest.mark.parametrize(("shape", "micro_batches", "place"), PLACES_IN_LEVELS)
def test_a_run_in_levels_that_is_killed_resumes_at_another_layout(
    tmp_path, whole, shape, micro_batches, place
):
    """A rank dies inside a level: what its host or its rack has already added is in no checkpoint."""
    codes, newest = run_and_kill(tmp_path, shape, micro_batches, place)
    assert codes.count(-signal.SIGKILL) == 1  # the others ended by themselves
    check_resumed(tmp_path, whole, codes, newest, LAYOUTS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    killed_run.train(folder, (1,), 1)
    return folder / "step-2"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": lambda p: flip(next(p.glob("*.distcp"))),
    "a flipped bit of the metadata": lambda p: flip(p / ".metadata"),
    "half a file": lambda p: os.truncate(next(p.glob("*.distcp")), 100),
    "an empty file": lambda p: os.truncate(next(p.glob("*.distcp")), 0),
    "a missing file": lambda p: next(p.glob("*.distcp")).unlink(),
    "a file of another step": lambda p: shutil.copy(
        next((p.parent / "other").glob("*.distcp")), next(p.glob("*.distcp"))
    ),
    "half a record": lambda p: os.truncate(p / "isobit.json", 20),
    "a record that is a list": lambda p: (p / "isobit.json").write_text("[]"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_on_every_rank(saved, tmp_path, damage, ranks):
    shutil.copytree(saved, folder := tmp_path / "damaged")
    shutil.copytree(saved.with_name("step-3"), tmp_path / "other")
    DAMAGE[damage](folder)

    def load(_):
        net = Net(killed_run.torch.float32)
        before = killed_run.bits.digest(net)
        with pytest.raises(ArgumentError, match="remedy"):
            checkpoint.load(folder, net)
        return before == killed_run.bits.digest(net)

    assert all(World(ranks).run(load).values)


def test_a_checkpoint_without_digests_is_loaded(saved, tmp_path, whole):
    """As one that an older version saved."""
    shutil.copytree(saved, folder := tmp_path / "older")
    record = json.loads((folder / "isobit.json").read_text())
    assert set(record.pop("files")) == {".metadata", "__0_0.distcp"}
    (folder / "isobit.json").write_text(json.dumps(record))
    assert killed_run.train(None, (1,), 1, resume=folder) == whole
