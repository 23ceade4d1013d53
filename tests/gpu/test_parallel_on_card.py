"""Training over micro-batches and ranks on a GPU: the bits of the CPU, as far as it can be tried without one.

The tensors say `cuda` (stand_in_card.py). Ranks are threads whose all-to-all and all-gather move rows between them, in
place of NCCL: what is tested is what isobit adds, and where. NCCL itself was not run.
"""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from stand_in_card import CARD, Card, OnCard, on_card, operators, to_card
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit import bits
from isobit.errors import ArgumentError
from isobit.ops.gpu import tiles
from isobit.ops.linear import partial
from isobit.order.cut import Cut
from isobit.parallel import GlobalBatch, Gradients
from isobit.parallel.collectives import elementwise_add, transfers
from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.levels import device_of_messages
from isobit.parallel.same_environment import facts_of

IDS = torch.randint(0, 40, (4, 5), generator=torch.Generator().manual_seed(0))


class Exchange:
    """Collectives of threads that move bytes and add nothing, as NCCL's do."""

    def __init__(self, ranks):
        self.ranks, self.barrier, self.sent = ranks, threading.Barrier(ranks), {}

    def swap(self, group, tensor, fill):
        self.sent[group.index] = tensor.clone()
        self.barrier.wait(20)
        fill([self.sent[rank] for rank in range(self.ranks)])
        self.barrier.wait(20)
        return SimpleNamespace(wait=lambda: None)

    def all_to_all_single(self, rows, sent, group, async_op):
        shares = rows.view(self.ranks, -1)

        def fill(everyone):
            for row, other in zip(shares, everyone, strict=True):
                row.copy_(other.view(self.ranks, -1)[group.index])

        return self.swap(group, sent, fill)

    def all_gather_single(self, whole, share, group, async_op):
        return self.swap(group, share, lambda everyone: whole.copy_(torch.cat(everyone)))


class Devices(TorchDispatchMode):
    """Which operators are called, and on which devices their arguments and results are."""

    def __init__(self):
        super().__init__()
        self.devices, self.calls = set(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls[function.name().partition(".")[0]] += 1
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                self.devices.add(tensor.device.type)
        return result


def reduce_on(device, rows, exchange):
    """Return the all-reduce of rows, one rank a row, as each rank has it."""
    found = {}

    def rank(index):
        with OnCard():
            flat = rows[index].clone().to(device)
            group = SimpleNamespace(index=index)
            comm = SimpleNamespace(rank=index, ranks=len(rows), group=group)
            assert (
                Communicator.uses_send_recv(SimpleNamespace(_uses_send_recv={}, group=group), flat)
                is False
            )
            transfer = transfers.AllToAllReduce(comm, flat, None)
            transfer.start()
            transfer.finish()
            found[index] = flat.cpu()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == exchange.ranks
    return [found[index] for index in range(len(rows))]


def balanced(rows):
    """Return the tree over rows, by plain additions."""
    while len(rows) > 1:
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def wide(*shape):
    """Return values of many magnitudes, subnormals among them."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.randint(-140, 60, shape, generator=generator)
    return torch.randn(shape, generator=generator).double().mul(2.0**scale).float()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_all_reduce_adds_along_the_tree(monkeypatch, ranks):
    rows = wide(ranks, 1003)
    exchange = Exchange(ranks)
    monkeypatch.setattr(transfers, "dist", exchange)
    with on_card():
        found = reduce_on("cuda", rows, exchange)
        assert operators["aten::add"] == ranks * (ranks - 1)
    assert all(bits.equal(one, balanced(list(rows))) for one in found)
    # Stock's order is another one, where there is more than one.
    assert bits.equal(rows.sum(0), balanced(list(rows))) is (ranks == 2)


def test_an_exchange_in_another_order_is_seen(monkeypatch):
    rows = wide(4, 1003)
    exchange = Exchange(4)
    monkeypatch.setattr(transfers, "dist", exchange)

    def chain(given, total):
        total.copy_(((given[0] + given[1]) + given[2]) + given[3])

    monkeypatch.setattr(transfers, "add_rows", chain)
    with on_card():
        found = reduce_on("cuda", rows, exchange)
    assert not any(bits.equal(one, balanced(list(rows))) for one in found)


def test_a_gpu_adds_all_elements_at_once():
    with on_card():
        long = torch.ones(3 * elementwise_add.BLOCK + 1, device="cuda")
        elementwise_add.add_two(long, long, long)
        assert operators["aten::add"] == 1
        assert bits.equal(long.cpu(), torch.full_like(long.cpu(), 2.0))


def train(device, micro_batches):
    """Return the gradients of four samples, and the norm before they are clipped."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))
    isobit.enable(to_card(model) if device == "cuda" else model)
    batch = GlobalBatch(total=4, micro_batches=micro_batches)
    gradients = Gradients(model, batch)
    for micro in range(micro_batches):
        ids = IDS[batch.samples(0, micro)].to(device)
        with gradients.micro_batch(micro):
            model(ids, labels=ids, use_cache=False, num_items_in_batch=16).loss.backward()
    norm = isobit.parallel.clip_grad_norm_(model, 1.0)
    assert norm.device.type == device
    return norm.cpu(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def test_micro_batches_on_a_card_have_the_gradient_of_one_batch_on_the_cpu():
    with on_card():
        expected, wanted = train("cpu", 1)
        for micro_batches in (1, 2, 4):
            norm, grads = train("cuda", micro_batches)
            assert bits.equal(norm, expected)
            assert [name for name in wanted if not bits.equal(grads[name], wanted[name])] == []
    assert len(wanted) == 14
    assert float(expected) > 1  # so that clipping changed the gradients


def test_the_norm_of_tensors_on_a_card():
    hard = [wide(50, 7), torch.tensor([3e-45, -2e38, 0.0]), wide(9).bfloat16()]
    with on_card():
        norm = isobit.optim.get_total_norm([Card(one) for one in hard])
        assert norm.is_cuda
        assert bits.equal(norm.cpu(), isobit.optim.get_total_norm(hard))
        broken = isobit.optim.get_total_norm([Card(torch.tensor([float("nan"), 1.0]))])
        assert bool(broken.isnan())


def test_ranks_on_gpus_of_two_kinds_do_not_agree(monkeypatch):
    """The engine of a rank is that of its GPU: an A100 and an H100 have two arithmetics in bf16, and one in fp32."""
    found = []
    for capability in ((8, 0), (9, 0), (10, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        found.append(facts_of({torch.bfloat16, torch.float32}, [CARD]))
    engines = [facts["engine of bfloat16"] for facts in found]
    assert engines == ["tc24x8", "tc25x16", "tc25x16", "that of sm_75"]
    assert {facts["engine of float32"] for facts in found} == {"chain"}
    assert tiles.engine_on_gpu(torch.float16, CARD) == "that of sm_75"


def test_partial_products_are_refused_on_a_card():
    """Tensor-parallel layers have no Triton executor of their partial sums yet."""
    with on_card():
        x, weight = (torch.randn(4, 256).to("cuda") for _ in range(2))
        with pytest.raises(ArgumentError, match="on the CPU"):
            partial.output(x, weight, Cut(512, 2, 0))


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda:3"),
    ],
)
def test_small_messages_are_where_a_backend_takes_them(monkeypatch, config, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of_messages(None) == torch.device(device)


def test_a_group_for_other_devices_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "xpu:xccl")
    with pytest.raises(ArgumentError, match="xpu:xccl"):
        device_of_messages(None)


def test_tensors_stay_on_their_device_in_every_collective():
    """On meta tensors, over torch's group without messages: no step of a collective moves a tensor to the CPU."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        whole, share = (torch.empty(size, device="meta") for size in (1004, 251))
        with Devices() as seen:
            isobit.parallel.all_reduce(torch.empty(17, 59, device="meta"))
            isobit.parallel.all_reduce(whole.view(4, -1).t(), async_op=True).wait()
            isobit.parallel.reduce_scatter(share, whole)
            isobit.parallel.all_gather(whole, share)
        assert seen.devices == {"meta"}
        assert seen.calls["c10d::alltoall_base_"] == 3
        assert seen.calls["c10d::_allgather_base_"] == 3
        assert seen.calls["aten::add"] == 3 * 3
        with Devices() as seen:  # a tensor that leaves its device is seen
            isobit.parallel.all_reduce(torch.empty(3, device="meta").new_ones(3, device="cpu"))
        assert "cpu" in seen.devices
    finally:
        dist.destroy_process_group()
