"""Runs that never end by themselves are ended: ranks that compute or wait forever, beside threads and processes."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

from isobit.errors import BusyError, DeadlockError, RankFailedError, UnsupportedError
from isobit.simulator import World
from isobit.simulator.execution import has_children
from isobit.simulator.program.script import Script
from isobit.simulator.program.threads import has_library_threads, pool_of
from isobit.simulator.sweep import Plan, run_seeds


def test_a_rank_that_never_lets_others_run_is_named_with_its_line():
    def body(rank):
        while rank == 2:
            pass
        dist.barrier()

    with pytest.raises(BusyError, match="rank 2 to reach a call") as caught:
        World(3, patience=0.5).run(body)
    assert caught.value.ranks == (2,)
    assert "in body" in caught.value.stacks[2][0]
    assert "patience" in caught.value.remedy
    World(3, patience=60.0).run(
        lambda rank: dist.barrier()
    )  # the remedy, and nothing is left of the rank


def test_a_rank_that_waits_in_c_is_named_and_left_behind():
    reading, writing = os.pipe()

    def body(rank):
        if rank == 1:
            os.read(reading, 1)
        dist.barrier()

    with pytest.raises(BusyError) as caught:
        World(2, patience=0.3).run(body)
    assert caught.value.ranks == (1,)
    os.write(writing, b"x")
    assert World(2).run(lambda rank: rank).values == [0, 1]


def test_a_sweep_ends_with_a_rank_that_is_busy(tmp_path):
    path = tmp_path / "busy.py"
    path.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\nwhile dist.get_rank(): pass\n"
    )
    runs = list(run_seeds(Plan(Script(path), 2, range(9), patience=0.3)))
    assert [[found.kind for found in run.found] for run in runs] == [["rank busy"]]


def test_a_deadlock_is_named_beside_threads_that_never_end():
    def beat():
        while True:
            time.sleep(10.0)

    def body(rank):
        if rank == 2:
            threading.Thread(target=beat, daemon=True).start()
        if rank == 0:
            beat()
        dist.barrier()

    with pytest.raises(DeadlockError) as caught:
        World(3).run(body)
    assert caught.value.ranks == (0,)
    assert "rank 0 in a loop of time.sleep" in caught.value.received


def sleep_for_ever(rank):
    while rank == 0:
        time.sleep(10.0)
    dist.barrier()


def test_the_resource_tracker_is_nobody_to_wait_for():
    before = has_children()  # another test may have left one in this process
    resource_tracker.ensure_running()
    assert has_children() == before


@pytest.mark.full  # torch.compile without its caches
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_compilers_of_torch_are_nobody_to_wait_for():
    before = has_children(), has_library_threads()
    with inductor_config.patch(force_disable_caches=True):  # what is cached starts no compiler
        compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
        compiled(torch.ones(3, 8))
    assert any(pool_of(thread) for thread in threading.enumerate())
    assert (has_children(), has_library_threads()) == before


def test_a_pool_at_work_is_waited_for():
    held = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        idle = has_library_threads()
        waiting = pool.submit(held.wait)
        try:
            assert has_library_threads()
        finally:
            held.set()
        waiting.result()
        assert has_library_threads() == idle


def test_another_process_is_waited_for_as_long_as_patience_lasts():
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            started = time.monotonic()
            with pytest.raises(DeadlockError):
                World(2, patience=1.0).run(sleep_for_ever)
            assert 1 <= time.monotonic() - started < 60
        finally:
            other.kill()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_part_of_the_deadlock():
    def body(rank):
        def call():
            if rank == 1:
                raise ValueError("no such shard")
            dist.barrier()

        thread = threading.Thread(target=call, name="loader")
        thread.start()
        thread.join()

    with pytest.raises(
        DeadlockError, match="thread 'loader' of rank 1 raised ValueError: no such shard"
    ) as caught:
        World(3).run(body)
    assert caught.value.ranks == (1,)


def test_a_refusal_on_a_rank_is_not_nested():
    def body(rank):
        torch.multiprocessing.spawn(print, nprocs=3)

    with pytest.raises(RankFailedError) as caught:
        World(2).run(body)
    assert isinstance(caught.value.__cause__, UnsupportedError)
    assert str(caught.value).count("expected ") == str(caught.value).count("remedy: ") == 1
    assert "--ranks" in caught.value.remedy


def test_ranks_that_enable_a_model_first_do_not_wait_for_one_another():
    """`enable` reads sources, and asks for files again and again under a lock: that is no loop that waits for a file.

    In a process of its own: only the first call of a process reads sources.
    """
    program = textwrap.dedent("""
        from isobit import enable
        from isobit.simulator import World
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16, vocab_size=64)
        config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1)

        def first(rank):
            return type(enable(Qwen3ForCausalLM(config).eval())).__name__

        print(World(4, patience=30).run(first).values)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Qwen3ForCausalLM") == 4
