"""Theorem: every layout of one state dict is equal, one flipped bit is found in every one of them."""

import doctest
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model

import isobit
from isobit.cli import main
from isobit.comparing.checkpoints import compare, names
from isobit.comparing.checkpoints.compare import compare_checkpoints
from tests.comparing.made_checkpoints import (
    flip_one_bit,
    fuse,
    state,
    write_index,
    write_ranks,
)


def as_safetensors(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_torch(folder, tensors):
    torch.save(tensors, folder / "model.pt")
    return folder / "model.pt"


def as_old_torch(folder, tensors):
    torch.save(tensors, folder / "model.pth", _use_new_zipfile_serialization=False)
    return folder / "model.pth"


def as_index(folder, tensors):
    return write_index(folder / "indexed", tensors)


def as_folder(folder, tensors):
    write_index(folder / "plain", tensors)
    (folder / "plain" / "model.safetensors.index.json").unlink()
    return folder / "plain"


def as_ranks(folder, tensors):
    return write_ranks(folder / "ranks", tensors)


def as_fused_ranks(folder, tensors):
    """Each rank fuses its own shares, as tensor-parallel programs do."""
    whole = write_ranks(folder / "split", tensors)
    for rank in range(2):
        (folder / "fused" / f"rank_{rank}").mkdir(parents=True)
        mine = torch.load(whole / f"rank_{rank}" / "model.pt")
        torch.save(fuse(mine), folder / "fused" / f"rank_{rank}" / "model.pt")
    return folder / "fused"


def as_fused(folder, tensors):
    return as_safetensors(folder, fuse(tensors))


@pytest.mark.filterwarnings("ignore")
def as_distributed(folder, tensors):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def as_wrapped(folder, tensors):
    return as_torch(folder, {f"module._orig_mod.model.{n}": t for n, t in tensors.items()})


LAYOUTS = [
    as_safetensors,
    as_torch,
    as_old_torch,
    as_index,
    as_folder,
    as_ranks,
    as_fused_ranks,
    as_fused,
    as_distributed,
    as_wrapped,
]


@pytest.fixture
def two(tmp_path):
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_every_layout_is_equal(layout, two):
    tensors = state()
    found = compare_checkpoints(as_safetensors(two[0], tensors), layout(two[1], tensors))
    assert found.equal, (found.differing, found.only_left, found.only_right, found.notes)
    elements = sum(t.numel() for t in tensors.values())
    shared = 2 * (6 + 1) if "ranks" in layout.__name__ else 6 + 1  # compared once per rank
    assert found.elements == elements - 7 + shared
    assert all(one.digests[0] == one.digests[1] for one in found.tensors)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("swap", [False, True])
def test_one_flipped_bit_is_found(layout, two, swap):
    paths = as_safetensors(two[0], state()), layout(two[1], flip_one_bit(state()))
    found = compare_checkpoints(*(reversed(paths) if swap else paths))
    assert found.exit_code == 1
    (one,) = found.differing
    assert one.name.endswith("layers.0.k_proj.weight")
    assert (one.difference.index, one.difference.ulps, one.difference.count) == ((0, 5), 1, 1)
    assert one.difference.total == 24
    assert 0 < one.largest < 1e-6
    assert found.elements_differ == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts_against_shards(layout, two):
    tensors = state()
    found = compare_checkpoints(layout(two[0], tensors), as_ranks(two[1], tensors))
    assert found.equal, (found.differing, found.only_left, found.only_right, found.notes)


def test_a_swapped_order_of_fused_parts_is_found(two):
    wrong = fuse(state(), ("q_proj", "v_proj", "k_proj"))
    found = compare_checkpoints(as_safetensors(two[0], state()), as_torch(two[1], wrong))
    assert {one.name for one in found.differing} == {
        "layers.0.k_proj.weight",
        "layers.0.v_proj.weight",
    }


def test_swapped_ranks_are_found(two):
    folder = as_ranks(two[1], state())
    (folder / "rank_0").rename(folder / "x")
    (folder / "rank_1").rename(folder / "rank_0")
    (folder / "x").rename(folder / "rank_1")
    found = compare_checkpoints(as_safetensors(two[0], state()), folder)
    assert {one.name for one in found.differing} == {n for n, t in state().items() if t.dim() == 2}


def test_a_replica_that_differs_is_found(two):
    folder = as_ranks(two[1], state())
    mine = torch.load(folder / "rank_1" / "model.pt")
    torch.save(flip_one_bit(mine, "norm.weight"), folder / "rank_1" / "model.pt")
    (one,) = compare_checkpoints(as_safetensors(two[0], state()), folder).differing
    assert (one.name, one.right) == ("norm.weight", "norm.weight@1")


def test_a_missing_rank_is_not_joined(two):
    folder = as_ranks(two[1], state())
    (folder / "rank_1").rename(folder / "rank_2")
    with pytest.raises(isobit.ArgumentError, match="names in common"):
        compare_checkpoints(as_safetensors(two[0], state()), folder)


def test_dtypes_and_shapes_that_differ(two):
    changed = state()
    changed["norm.weight"] = changed["norm.weight"].float()
    changed["layers.0.down_proj.weight"] = changed["layers.0.down_proj.weight"].t().contiguous()
    found = compare_checkpoints(as_torch(two[0], state()), as_torch(two[1], changed))
    by_name = {one.name: one.difference for one in found.differing}
    assert by_name["norm.weight"].what == "dtype"
    assert by_name["layers.0.down_proj.weight"].what == "shape"
    assert len(by_name) == 2


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.bool,
        torch.complex64,
        torch.int64,
    ],
    ids=str,
)
def test_every_dtype_is_compared(two, dtype):
    paths = []
    for folder, second in zip(two, (1, 0), strict=True):
        paths.append(as_safetensors(folder, {"x": torch.tensor([1, second]).to(dtype)}))
    (one,) = compare_checkpoints(*paths).differing
    assert one.largest == 1.0
    assert compare_checkpoints(paths[0], paths[0]).equal


def test_nan_signs_and_zeros_count(two):
    a = as_torch(two[0], {"x": torch.tensor([0.0, float("nan"), float("inf")])})
    b = as_torch(two[1], {"x": torch.tensor([-0.0, float("nan"), 1.0])})
    (one,) = compare_checkpoints(a, b).differing
    assert (one.difference.count, one.difference.index, one.largest) == (2, (0,), 0.0)


def training(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def test_nested_trees_and_their_values(two):
    left, right = training(), training()
    right["optimizer"]["param_groups"][0]["lr"] = 1.0000000000000002e-3
    paths = as_torch(two[0], left), as_torch(two[1], right)
    found = compare_checkpoints(*paths)
    assert not found.differing
    assert [v.name for v in found.values_differ] == ["optimizer.param_groups.0.lr"]
    assert found.exit_code == 1
    assert {"model.weight", "optimizer.state.0.exp_avg"} <= {t.name for t in found.tensors}
    assert compare_checkpoints(as_distributed(two[0], left), paths[0]).equal


def test_a_training_checkpoint_against_its_model(two):
    paths = as_torch(two[0], training()), as_safetensors(two[1], training()["model"])
    found = compare_checkpoints(*paths)
    assert found.exit_code == 1
    assert "optimizer.state.0.exp_avg" in found.only_left
    assert compare_checkpoints(*paths, common_only=True).exit_code == 0
    assert found.mappings == {"A without 'model.'": 2}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def test_a_tie_is_shown_by_storage_metadata_or_configuration(two):
    model = Tied()
    whole = as_torch(two[0], model.state_dict())
    save_model(model, str(two[1] / "model.safetensors"))
    found = compare_checkpoints(whole, two[1])
    assert found.equal
    assert [tie.shown_by for tie in found.ties] == ["one storage of both names in model.pt"]
    copies = {n: t.clone() for n, t in model.state_dict().items()}
    found = compare_checkpoints(as_torch(two[0], copies), two[1])
    assert found.equal
    assert "metadata of model.safetensors" in found.ties[0].shown_by
    save_file({"embed_tokens.weight": model.embed_tokens.weight}, two[1] / "model.safetensors")
    found = compare_checkpoints(two[0], two[1])
    assert (found.exit_code, found.only_left) == (1, ("lm_head.weight",))  # equal bits show no tie
    (two[1] / "config.json").write_text('{"tie_word_embeddings": true}')
    assert compare_checkpoints(two[0], two[1]).equal
    copies["lm_head.weight"][0, 0] += 1
    found = compare_checkpoints(as_torch(two[0], copies), two[1])
    assert (found.exit_code, found.ties) == (1, ())


def test_the_command(two, capsys):
    a, b = as_safetensors(two[0], state()), as_fused(two[1], flip_one_bit(state()))
    assert main.main(["compare", "checkpoints", str(a), str(a), "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "equal: 0 of 8 tensors differ, 0 of 283 elements, 764 bytes compared; 0 of 0 values differ; "
        "only in A 0, only in B 0"
    )
    assert main.main(["compare", "checkpoints", str(a), str(b), "-q"]) == 1
    shown = capsys.readouterr().out
    assert "qkv_proj is q_proj + k_proj + v_proj along dimension 0" in shown
    assert "1 of 24" in shown
    assert main.main(["compare", "checkpoints", str(a), str(b), "-q", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["equal"], record["tensors_compared"], record["elements_differ"]) == (False, 8, 1)
    assert all(len(digest) == 32 for one in record["tensors"] for digest in one["digests"])


def test_nothing_in_common_is_not_equal(two, capsys):
    a, b = as_torch(two[0], {"x": torch.ones(1)}), as_torch(two[1], {"y": torch.ones(1)})
    assert main.main(["compare", "checkpoints", str(a), str(b), "-q", "--common"]) == 2
    assert "nothing was compared" in capsys.readouterr().out
    empty = as_torch(two[0], {})
    assert main.main(["compare", "checkpoints", str(empty), str(empty), "-q"]) == 2
    assert main.main(["compare", "checkpoints", str(two[0] / "nothing.pt"), str(b), "-q"]) == 2
    capsys.readouterr()


def test_mappings_are_said(two):
    wrapped = {f"module.{n}": t for n, t in fuse(state()).items()}
    found = compare_checkpoints(as_torch(two[0], wrapped), as_safetensors(two[1], state()))
    fused = "qkv_proj is q_proj + k_proj + v_proj along dimension 0"
    assert found.mappings == {
        "A without 'module.'": 3,
        f"A without 'module.'; {fused}": 3,
        "A without 'module.'; gate_up_proj is gate_proj + up_proj along dimension 0": 2,
    }


def test_names_that_could_mean_two_tensors_are_not_mapped(two):
    left = {"module.a": torch.ones(1), "_orig_mod.a": torch.ones(1), "b": torch.ones(1)}
    right = {"a": torch.ones(1), "b": torch.ones(1)}
    found = compare_checkpoints(as_torch(two[0], left), as_torch(two[1], right))
    assert found.only_left == ("_orig_mod.a", "module.a")
    assert found.only_right == ("a",)


@pytest.mark.parametrize("module", [compare, names], ids=lambda m: m.__name__)
def test_examples_of_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
