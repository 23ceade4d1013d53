"""Programs that expect CUDA run on CPU tensors: devices answer as on a GPU, and copies are made where one would be."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from isobit.errors import ArgumentError, DeadlockError, RankFailedError
from isobit.simulator import World, run_script

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def on_two(function):
    """Run a function on two ranks that have a device each."""
    return World(2, accelerator="cuda").run(function).values


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_run_unmodified_on_eight_ranks(path, tmp_path, capsys):
    run_script(path, [str(tmp_path)], ranks=8, watch=("bits", "training"))
    assert capsys.readouterr().out


def test_devices_answer_as_on_a_gpu():
    def program(rank):
        torch.cuda.set_device(rank)
        x = torch.ones(3)
        y = x.cuda()
        y += 1  # a copy: x is not changed
        assert x.tolist() == [1.0] * 3
        assert x.device.type == "cpu"
        assert not x.is_cuda
        assert y.is_cuda
        assert y.get_device() == rank
        assert (y * 2).device == torch.device("cuda", rank)
        assert y.cuda() is y
        assert y.to("cuda") is y
        assert x.cpu() is x
        back = y.cpu()
        back += 1
        assert y.tolist() == [2.0] * 3
        assert not back.is_cuda
        other = torch.zeros(2, device=torch.device("cuda", 1 - rank))
        assert other.device.index == 1 - rank
        assert other.to(y).device.index == rank
        assert y.to(torch.float64).is_cuda
        assert torch.zeros_like(y).is_cuda
        assert torch.tensor([1], device=rank).device == torch.device(rank)
        with torch.cuda.device(1 - rank):
            assert torch.empty(1, device="cuda").device.index == 1 - rank
        return torch.cuda.current_device(), torch.cuda.device_count(), torch.cuda.is_available()

    assert on_two(program) == [(0, 2, True), (1, 2, True)]
    assert not torch.cuda.is_available() or torch.version.cuda  # nothing is left replaced
    assert "record_stream" not in vars(torch.Tensor)


def test_modules_gradients_and_losses_are_those_of_the_cpu():
    def program(rank, device):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.full((2, 4), float(rank), device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
        return loss.item(), next(model.parameters()).device.type, model.weight.grad.device.type

    served = World(2, accelerator="cuda").run(program, "cuda").values
    plain = World(2).run(program, "cpu").values
    assert [loss for loss, *_ in served] == [loss for loss, *_ in plain]
    assert served[0][1:] == ("cuda", "cuda")


def test_a_device_that_does_not_exist_and_functions_that_are_not_served():
    with pytest.raises(RankFailedError, match="invalid device ordinal 2"):
        on_two(lambda rank: torch.ones(1).cuda(2))
    with pytest.raises(RankFailedError, match=r"torch\.cuda\.make_graphed_callables"):
        on_two(lambda rank: torch.cuda.make_graphed_callables(None, ()))
    with pytest.raises(ArgumentError, match="accelerator"):
        World(2, accelerator="tpu")
    with pytest.raises(RankFailedError):  # a world without devices is as before
        World(1).run(lambda rank: torch.ones(1).cuda())


def test_bugs_are_found_on_served_devices():
    def program(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(1, device="cuda"))

    with pytest.raises(DeadlockError) as found:
        World(4, accelerator="cuda").run(program)
    assert found.value.ranks == (0,)


def test_autocast_and_hooks_in_a_backward_pass():
    def program(rank):
        x = torch.ones(2, 2, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = x @ x
        y.register_hook(lambda gradient: gradient + torch.zeros_like(gradient, device="cuda"))
        y.float().sum().backward()
        return y.dtype, x.grad.is_cuda

    assert on_two(program) == [(torch.bfloat16, True)] * 2


def test_spawn_gives_each_rank_its_process():
    def worker(index, offset, seen):
        seen.append((index + offset, dist.get_rank()))

    def program(rank, count):
        seen = []
        context = mp.spawn(worker, args=(10, seen), nprocs=count, join=False)
        assert context.join()
        return seen

    assert World(2).run(program, 2).values == [[(10, 0)], [(11, 1)]]
    with pytest.raises(RankFailedError, match="as many processes as ranks: 2"):
        World(2).run(program, 3)
