"""Programs run unmodified: any backend name, spawn, scripts as under torchrun; and the process is left whole."""

import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing
from torch.nn.modules import module
from torch.optim import optimizer

from isobit.errors import MismatchError, RankFailedError, UnsupportedError
from isobit.simulator import World, run_script, spawn
from isobit.simulator.call_sites import INSTALLED


@pytest.mark.parametrize("backend", ["gloo", "nccl", "isobit", None])
def test_spawn_serves_any_backend(backend):
    def body(rank, ranks, base):
        dist.init_process_group(
            backend, rank=rank, world_size=ranks, init_method="tcp://127.0.0.1:1"
        )
        x = torch.tensor([base + rank])
        dist.all_reduce(x)
        dist.all_reduce(x, group=dist.new_group(backend="gloo"))
        dist.destroy_process_group()
        return x.item()

    assert spawn(body, (3, 10), nprocs=3).values == [99] * 3


def test_spawn_takes_what_torch_multiprocessing_takes():
    import inspect

    theirs = inspect.signature(torch.multiprocessing.spawn).parameters
    ours = inspect.signature(spawn).parameters
    assert [*theirs, "seed"] == list(ours)
    assert all(theirs[name].default == ours[name].default for name in theirs)


def test_a_rank_spawns_no_other_number_of_processes():
    with pytest.raises(RankFailedError, match=r"(?s)UnsupportedError.*isobit\.simulator\.spawn"):
        World(2).run(lambda rank: torch.multiprocessing.spawn(print, nprocs=3))
    assert torch.multiprocessing.spawn.__module__ == "torch.multiprocessing.spawn"


def test_handlers_of_signals_are_taken_and_never_called():
    before = signal.getsignal(signal.SIGTERM)
    World(2).run(lambda rank: signal.signal(signal.SIGTERM, print))
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.signal.__module__ == "signal"


def test_a_group_may_be_made_again_after_it_was_destroyed():
    def body(rank):
        for _ in range(3):
            dist.init_process_group("gloo")
            x = torch.ones(1)
            dist.all_reduce(x)
            dist.destroy_process_group()
        return x.item()

    assert World(3, 2).run(body, init=False).values == [3] * 3


def test_a_wrong_rank_is_named():
    def body(rank):
        dist.init_process_group("gloo", rank=0, world_size=2, init_method="tcp://127.0.0.1:1")

    with pytest.raises(MismatchError) as caught:
        World(2).run(body, init=False)
    assert caught.value.ranks == (1,)


SCRIPT = """
import os, sys
from dataclasses import dataclass
import torch, torch.distributed as dist

@dataclass
class Said:
    rank: int

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    os.environ["MINE"] = f"set by {rank}"
    dist.init_process_group("gloo")
    assert dist.get_rank() == rank and dist.get_world_size() == int(os.getenv("WORLD_SIZE"))
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, Said(rank))
    assert all(isinstance(one, Said) for one in said)
    heard = [one.rank for one in said]
    mine = os.environ["MINE"], os.environ["LOCAL_RANK"], dict(os.environ)["RANK"]
    words = [sys.argv.pop(1), *sys.argv[1:]]
    dist.destroy_process_group()
"""


def test_a_script_runs_as_main_on_every_rank(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    main, argv, before = sys.modules["__main__"], sys.argv, dict(os.environ)
    for rank, space in enumerate(run_script(path, ["--steps", "3"], ranks=3, seed=4).values):
        assert space["heard"] == [0, 1, 2]
        assert space["mine"] == (f"set by {rank}", str(rank), str(rank))
        assert space["words"] == ["--steps", "3"]
    assert (sys.modules["__main__"], sys.argv, dict(os.environ)) == (main, argv, before)


@pytest.mark.parametrize("code", [0, 3])
def test_scripts_that_exit(tmp_path, code):
    path = tmp_path / "script.py"
    path.write_text(f"import sys\nsys.exit({code})\n")
    if code:
        with pytest.raises(RankFailedError, match="SystemExit: 3"):
            run_script(path, ranks=2)
    else:
        run_script(path, ranks=2)


def held():
    return (
        c10d._world,
        c10d.rendezvous,
        c10d._new_process_group_helper,
        dist.monitored_barrier,
        sys.excepthook,
        os.environ._data,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        threading.active_count(),
        sys.argv,
        torch.compile,
        torch._dynamo.config.recompile_limit,
        *[
            len(hooks)
            for hooks in (optimizer._global_optimizer_pre_hooks, module._global_forward_hooks)
        ],
        *[
            len(hooks)
            for hooks in (optimizer._global_optimizer_post_hooks, module._global_forward_pre_hooks)
        ],
    )


def test_the_process_is_left_as_it_was_also_after_failures():
    def good(rank):
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    def bad(rank):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        os.environ["LEAKED"] = "1"
        torch.compile(torch.nn.Linear(1, 1))
        dist.barrier()
        if rank == 1:
            raise KeyError("gone")
        dist.barrier()

    before = held()
    for _ in range(2):
        with pytest.raises(RankFailedError):
            World(3, watch=("training",)).run(bad)
        assert held() == before
        assert "LEAKED" not in os.environ
        assert not dist.is_initialized()
        assert World(3).run(good).values == [3] * 3


def test_default_dtype_and_grad_mode_are_each_ranks_own():
    def body(rank):
        if rank == 1:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        dist.barrier()
        return torch.ones(1).dtype, torch.is_grad_enabled()

    with torch.no_grad():
        assert World(2).run(body).values == [(torch.float32, True), (torch.float64, False)]


def test_worlds_do_not_nest():
    with pytest.raises(RankFailedError, match="one simulated run at a time") as caught:
        World(2).run(lambda rank: World(2).run(print))
    assert isinstance(caught.value.__cause__, UnsupportedError)
    assert "another process" in caught.value.__cause__.remedy


LIBRARY = """
def call(group, tensor, caught):
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        caught.append(error)
"""


def test_a_thread_of_a_library_communicates_not_and_the_refusal_says_so():
    """It runs beside the schedule, so that the order of its calls would follow the wall clock."""
    names = {"dist": dist}
    exec(compile(LIBRARY, os.path.join(INSTALLED, "library.py"), "exec"), names)

    def body(rank):
        caught = []
        thread = threading.Thread(
            target=names["call"], args=(dist.group.WORLD, torch.ones(1), caught)
        )
        thread.start()
        thread.join()
        return caught

    for value in World(2).run(body).values:
        assert [type(error) for error in value] == [UnsupportedError]
        assert "ThreadPoolExecutor" in value[0].remedy
