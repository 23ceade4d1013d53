"""A checkpoint saved at one layout and loaded at another continues training with the same bits."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.device_mesh import init_device_mesh

import isobit
from isobit import ArgumentError, bits
from isobit.integrations.transformers.tensor_parallel import shard
from isobit.optim import AdamW
from isobit.order.plan import VERSION
from isobit.parallel.checkpoint import load, save
from isobit.parallel.tensor.shard import full_state, gather_shards, owner_of, shard_table
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup
from isobit.simulator import World
from tests.parallel import split_models as models

DTYPE = torch.bfloat16


def make(ranks, seed):
    model = models.build(DTYPE, tied=True, seed=seed)
    isobit.enable(model)
    if ranks is not None:
        shard(model, ranks)
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    return model, AdamW(groups, lr=1e-3 * (1 + seed))


def step(model, optimizer):
    inputs = models.batch()
    optimizer.zero_grad()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()


def whole_state(model, optimizer):
    """The digest of parameters and of the optimizer's state, brought together."""
    shards, found = shard_table(model), full_state(model)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            cut = name in shards and value.dim()
            found[f"{key} {name}"] = (
                gather_shards(value, shards[name], owner_of(model, name)) if cut else value
            )
    return bits.digest(found)


def on_mesh(shape, check):
    """The value of check(ranks of the tensor-parallel axis) on each rank of a (data, tensor) mesh."""

    def run(_):
        return check(
            TensorParallelGroup.of(
                init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]
            )
        )

    return World(shape[0] * shape[1]).run(run).values


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder written at tp = 2 beside dp = 2, and the digests at that step and one step later."""
    folder = tmp_path_factory.mktemp("run") / "step-1"

    def train(ranks):
        model, optimizer = make(ranks, seed=0)
        step(model, optimizer)
        save(folder, model, optimizer, step=1, extra={"samples": 4})
        held = whole_state(model, optimizer)
        step(model, optimizer)
        return held, whole_state(model, optimizer)

    (digests,) = set(on_mesh((2, 2), train))
    assert digests[0] != digests[1]
    return folder, digests


def resume(ranks, folder):
    model, optimizer = make(ranks, seed=1)
    before = whole_state(model, optimizer)
    loaded = load(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (1, {"samples": 4})
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (1e-3, (0.9, 0.999), 0.1),
        (1e-3, (0.9, 0.999), 0.0),
    ]
    held = whole_state(model, optimizer)
    assert held != before
    step(model, optimizer)
    return held, whole_state(model, optimizer)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1)])
@pytest.mark.sweep(1)
def test_loaded_at_another_layout(saved, shape):
    folder, digests = saved
    assert set(on_mesh(shape, lambda ranks: resume(ranks, folder))) == {digests}


def test_loaded_without_ranks(saved):
    folder, digests = saved
    assert not dist.is_initialized()
    assert resume(None, folder) == digests


def test_stock_reads_the_whole_model(saved):
    folder, _ = saved
    model, _ = make(None, seed=1)
    load(folder, expected := make(None, seed=2)[0])
    with pytest.warns(UserWarning, match="single process"):
        stock_load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    assert bits.digest(model) == bits.digest(expected)


def test_a_folder_is_whole_or_not_there(saved, tmp_path, monkeypatch):
    model, optimizer = make(None, seed=0)
    with pytest.raises(ArgumentError, match="exists"):
        save(saved[0], model, optimizer)
    monkeypatch.setattr("isobit.parallel.checkpoint.write_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(tmp_path / "cut short", model)
    assert not (tmp_path / "cut short").exists()
    with pytest.raises(ArgumentError, match="never finished"):
        load(tmp_path / "cut short.partial", model)
    monkeypatch.undo()
    save(tmp_path / "cut short", model)  # what was left over is no hindrance
    load(tmp_path / "cut short", model)
    record = tmp_path / "cut short" / "isobit.json"
    record.write_text(record.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(ArgumentError, match="of format 2\n  received: format 3"):
        load(tmp_path / "cut short", model)


@pytest.mark.parametrize("saved_by", [1, VERSION + 1])
def test_another_version_of_the_order_is_refused_and_the_remedy_works(saved, tmp_path, saved_by):
    folder = tmp_path / "other"
    shutil.copytree(saved[0], folder)
    record = json.loads((folder / "isobit.json").read_text())
    assert record["order"] == VERSION
    # Version 1 was saved in format 1, which had no version of the order.
    record |= {"format": 1} if saved_by == 1 else {"order": saved_by}
    if saved_by == 1:
        del record["order"]
    (folder / "isobit.json").write_text(json.dumps(record))
    model, optimizer = make(None, seed=1)
    before = bits.digest(model)
    with pytest.raises(ArgumentError, match=f"version {VERSION} of the order") as refused:
        load(folder, model, optimizer)
    assert f"version {saved_by} in" in refused.value.received
    assert f"pass order={saved_by}" in refused.value.remedy
    assert bits.digest(model) == before
    load(folder, model, optimizer, order=saved_by)
    load(saved[0], expected := make(None, seed=2)[0])
    assert bits.digest(model) == bits.digest(expected)
    with pytest.raises(ArgumentError, match=f"pass order={VERSION}"):
        load(saved[0], model, order=saved_by)


def test_errors_name_the_function(saved, tmp_path):
    model, home = torch.nn.Linear(2, 2), r"^isobit\.parallel\.checkpoint"
    with pytest.raises(ArgumentError, match=rf"{home}\.load: expected a complete folder"):
        load(tmp_path, model)
    with pytest.raises(ArgumentError, match=rf"{home}\.save: expected a new folder"):
        save(saved[0], model)
    foreign = AdamW([torch.nn.Parameter(torch.zeros(1))])  # raised by a function that save calls
    with pytest.raises(ArgumentError, match=rf"{home}\.save: expected an optimizer"):
        save(tmp_path / "new", model, foreign)


def test_another_optimizer_is_refused(saved):
    model, _ = make(None, seed=0)
    with pytest.raises(ArgumentError, match="2 groups"):
        load(saved[0], model, AdamW(model.parameters()))
    with pytest.raises(ArgumentError, match="others"):
        load(saved[0], model, AdamW([torch.nn.Parameter(torch.zeros(1))]))
