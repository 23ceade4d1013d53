"""Programs that expect CUDA run on CPU tensors: devices answer as on a GPU, and copies are made where one would be."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, dataloader

from isobit.errors import ArgumentError, DeadlockError, DeviceError, RankFailedError
from isobit.simulator import World
from isobit.simulator.accelerator.modules import kind_in


def on_two(function):
    """Run a function on two ranks that have a device each."""
    return World(2, accelerator="cuda").run(function).values


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


class Batch:
    """A batch that pins itself, as torch lets programs write one."""

    def __init__(self, samples):
        self.samples, self.times_pinned = torch.stack(samples), 0

    def pin_memory(self):
        self.times_pinned += 1
        return self


def test_loaders_with_workers_and_pinned_memory():
    def program(rank):
        torch.cuda.set_device(rank)
        data = torch.arange(6.0).add(10 * rank)
        plain = DataLoader(data, batch_size=2, num_workers=2, pin_memory=True)
        own = DataLoader(
            data, batch_size=3, num_workers=1, pin_memory=True, collate_fn=Batch, timeout=60
        )
        taken = [batch.cuda(non_blocking=True) for batch in plain]
        assert all(batch.device == torch.device("cuda", rank) for batch in taken)
        batches = list(own)
        assert [batch.times_pinned for batch in batches] == [1, 1]
        return torch.cat(taken).tolist() + batches[1].samples.tolist()

    expected = [0.0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert on_two(program) == [expected, [value + 10 for value in expected]]
    assert dataloader._BaseDataLoaderIter.__init__.__module__ == dataloader.__name__  # restored


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


def check_kind(kind):
    def program(rank):
        module = getattr(torch, kind)
        module.set_device(rank)
        model = getattr(torch.nn.Linear(2, 2), kind)()
        x = getattr(torch.ones(1, 2), kind)()
        assert getattr(x, f"is_{kind}")
        assert x.device == torch.device(kind, rank) == torch.device(f"{kind}:{rank}")
        assert x.type() == f"torch.{kind}.FloatTensor"
        with torch.autocast(kind, dtype=torch.bfloat16), module.stream(module.Stream()):
            y = model(x)
        y.float().sum().backward()
        assert model.weight.grad.device.type == kind
        draw = torch.Generator(device=kind).manual_seed(1)
        assert isinstance(torch.default_generator, torch.Generator)
        assert torch.rand(2, generator=draw, device=kind).device.type == kind
        accelerator = torch.accelerator
        assert accelerator.current_accelerator().type == draw.device.type == kind
        assert accelerator.is_available()
        assert accelerator.current_device_index() == module.current_device() == rank
        accelerator.synchronize()
        assert module.mem_get_info()[0] > 0
        ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        ddp(x).sum().backward()
        return y.dtype, accelerator.device_count(), accelerator.memory_allocated()

    found = World(2, accelerator=kind, watch=("devices",)).run(program).values
    assert found == [(torch.bfloat16, 2, 0)] * 2
    assert not hasattr(torch.Tensor, "npu")
    assert torch.Generator.__module__ == "torch._C"


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_every_kind_of_device_is_served_by_one_table(kind):
    check_kind(kind)


@pytest.mark.full
def test_npu_in_a_process_of_its_own():
    """Its name remains in the process; other worlds, and torch without a world, work as before."""
    code = (
        "import torch; from isobit.simulator import World;"
        "from tests.simulator.test_served_devices import check_kind;"
        "check_kind('npu'); check_kind('cuda'); check_kind('npu');"
        "World(2).run(lambda rank: torch.distributed.barrier());"
        "torch.manual_seed(0); assert not torch.accelerator.is_available();"
        "assert not torch.npu.is_available() and not hasattr(torch.npu, 'set_device')"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_the_kind_is_the_one_that_a_script_names():
    assert kind_in(b"x.cuda()") == kind_in(b"import accelerate") == "cuda"
    assert kind_in(b"dist.init_process_group('nccl')") == "cuda"
    assert kind_in(b"import torch_npu") == kind_in(b"x.to('npu')") == "npu"
    assert kind_in(b"model.to('xpu')") == "xpu"
    assert kind_in(b"input = torch.ones(1)") == ""


def test_files_keep_devices_and_a_rank_on_another_ranks_device_is_named(tmp_path):
    def program(rank, place):
        torch.cuda.set_device(rank)
        x = torch.full((2,), 3.0, device="cuda")
        if rank == 0:
            torch.save({"x": x, "host": torch.ones(1)}, tmp_path / "x.pt")
        dist.barrier()
        loaded = torch.load(tmp_path / "x.pt", map_location=place, weights_only=True)
        assert loaded["host"].device.type == "cpu"
        return str(loaded["x"].device), loaded["x"].tolist()

    watched = {"accelerator": "cuda", "watch": ("devices",)}
    own = {"cuda:0": "cuda"}  # the current device of each rank
    assert World(2, **watched).run(program, own).values == [
        ("cuda:0", [3.0] * 2),
        ("cuda:1", [3.0] * 2),
    ]
    assert World(2, **watched).run(program, "cpu").values == [("cpu", [3.0] * 2)] * 2
    with pytest.raises(DeviceError) as found:
        World(2, **watched).run(program, None)
    assert found.value.ranks == (1,)
    assert found.value.result.values[1][0] == "cuda:0"
    World(2, accelerator="cuda").run(program, None)  # not watched

    def numbered_backwards(rank):
        dist.all_reduce(torch.ones(1, device=f"cuda:{1 - rank}"))

    World(2, **watched).run(numbered_backwards)
