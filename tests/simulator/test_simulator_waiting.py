"""Ranks that wait without torch.distributed: sleeps, polls, locks, threads and event loops pass the baton.

Theorem: virtual time and the order of threads are functions of the seed; the wall clock only ends a run.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d

from isobit.errors import RankFailedError
from isobit.simulator import World
from tests.simulator.clean_programs import (
    beats_beside,
    communicates_on_threads,
    polls_a_file,
    polls_without_sleep,
)


@pytest.mark.parametrize(
    "program", [polls_a_file, polls_without_sleep, communicates_on_threads, beats_beside]
)
def test_a_seed_is_a_run_also_with_polls_and_threads(program):
    runs = [World(4, seed).run(program, seed) for seed in (3, 3, 4)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].clocks == runs[1].clocks


def test_sleep_takes_virtual_time_alone():
    def body(rank):
        begun = time.time(), time.monotonic(), time.perf_counter_ns()
        time.sleep(300.0 * (rank + 1))
        dist.barrier()
        return (
            time.time() - begun[0],
            time.monotonic() - begun[1],
            (time.perf_counter_ns() - begun[2]) * 1e-9,
        )

    begun = time.monotonic()
    result = World(3, delays=False).run(body)
    assert time.monotonic() - begun < 30.0
    for value in result.values:
        assert value == pytest.approx((900.0, 900.0, 900.0), abs=0.01)


def test_ranks_start_at_times_of_their_own():
    def body(rank):
        return time.time_ns()

    first, again = (World(4, seed=2).run(body).values for _ in range(2))
    assert len(set(first)) == 4
    assert [t - first[0] for t in first] != [0, 0, 0, 0]
    assert sorted(range(4), key=first.__getitem__) == sorted(range(4), key=again.__getitem__)


def test_other_processes_are_waited_for_in_real_time():
    """Also where a rank polls them, however short its sleeps are beside the half hour that a group may take."""
    code = [sys.executable, "-c", "import time; time.sleep(0.6)"]

    def body(rank):
        subprocess.run([*code[:2], "pass"], check=True, timeout=60.0)
        child = subprocess.Popen(code)
        while rank == 0 and child.poll() is None:
            time.sleep(5.0)
        dist.barrier()
        return child.wait(timeout=60.0)

    assert World(2).run(body).values == [0, 0]


def test_a_forked_process_keeps_the_machines_time_and_the_ranks_variables():
    def child(answers):
        time.sleep(0.001)
        threading.Event().wait(0.001)
        answers.put(os.environ["RANK"])

    def body(rank):
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        process = context.Process(target=child, args=(answers,))
        process.start()
        answer = answers.get(timeout=60.0)
        process.join()
        return answer

    assert World(2).run(body).values == ["0", "1"]


def test_a_thread_has_its_ranks_groups_random_numbers_and_variables():
    def body(rank):
        torch.manual_seed(rank)
        found = [torch.rand(1).item()]

        def call():
            total = functional.wait_tensor(
                functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
            )
            found.append((torch.rand(1).item(), dist.get_rank(), os.environ["RANK"], total.item()))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return *found, torch.rand(1).item()

    for rank, value in enumerate(World(3).run(body).values):
        torch.manual_seed(rank)
        drawn = [torch.rand(1).item() for _ in range(3)]
        assert value == (drawn[0], (drawn[1], rank, str(rank), 3.0), drawn[2])


def test_threads_that_nobody_joins_are_waited_for_as_a_process_does():
    pools = []

    def body(rank):
        done = []
        threading.Thread(
            target=lambda: (time.sleep(5.0), dist.barrier(), done.append("thread"))
        ).start()
        pools[rank:] = pools[rank:] or [ThreadPoolExecutor(1)]
        pools[rank].submit(lambda: (time.sleep(9.0), done.append("pool")))
        return done

    for seed in (0, 0, 1):  # a pool that a module keeps serves the next world as well
        assert World(1, seed).run(body).values == [["thread", "pool"]]


def test_a_checkpoint_is_saved_by_a_thread(tmp_path):
    import torch.distributed.checkpoint as checkpoint

    def body(rank):
        state = {"weight": torch.full((2,), 5.0)}
        checkpoint.async_save(state, checkpoint_id=tmp_path / "saved").result()
        state["weight"].zero_()
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        return state["weight"].tolist()

    assert World(2).run(body).values == [[5.0, 5.0]] * 2


def test_a_lock_is_kept_over_a_collective():
    def body(rank):
        lock, order = threading.RLock(), []

        def call(index):
            with lock:
                time.sleep(0.1)
                dist.barrier()
                order.append(index)

        threads = [threading.Thread(target=call, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            pass
        held = threading.Lock()
        held.acquire()
        assert not held.acquire(timeout=60.0)
        return sorted(order)

    assert World(2).run(body).values == [[0, 1, 2]] * 2


def test_a_store_waits_no_longer_than_it_is_told():
    def body(rank):
        with pytest.raises(dist.DistStoreError, match="nobody sets it"):
            c10d._get_default_store().wait(["nobody sets it"], timedelta(seconds=30))

    World(2).run(body)


def test_the_current_folder_and_the_number_of_threads_are_each_ranks_own(tmp_path):
    def body(rank):
        (tmp_path / str(rank)).mkdir()
        os.chdir(tmp_path / str(rank))
        torch.set_num_threads(rank + 1)
        dist.barrier()
        return os.getcwd(), torch.get_num_threads()

    before = os.getcwd(), torch.get_num_threads()
    expected = [(str((tmp_path / str(rank)).resolve()), rank + 1) for rank in range(3)]
    assert World(3).run(body).values == expected
    assert (os.getcwd(), torch.get_num_threads()) == before


def test_no_alarm_comes_to_a_rank():
    def body(rank):
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("an alarm"))
        before = signal.alarm(1), signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(5.0)
        return before

    assert World(2).run(body).values == [(0, (0.0, 0.0))] * 2
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_was_replaced_is_put_back():
    def held():
        return (
            *[
                getattr(time, name)
                for name in ("time", "time_ns", "monotonic", "perf_counter", "sleep")
            ],
            *[getattr(threading, name) for name in ("Lock", "RLock", "_allocate_lock", "_time")],
            *[getattr(threading.Thread, name) for name in ("start", "join", "is_alive")],
            *[getattr(os, name) for name in ("stat", "listdir", "access", "scandir", "chdir")],
            frozenset(os.supports_follow_symlinks),
            threading.Event.is_set,
        )

    before = held()
    World(2).run(lambda rank: dist.barrier())
    with pytest.raises(RankFailedError):
        World(2).run(lambda rank: 1 / 0)
    assert held() == before
