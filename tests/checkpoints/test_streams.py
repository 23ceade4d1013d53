"""Theorem: what a comparison finds does not depend on the size of its blocks, nor its memory on that of tensors."""

import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import isobit
from isobit.comparing.checkpoints import compare, streams
from isobit.comparing.checkpoints.compare import compare_checkpoints
from tests.checkpoints.made_checkpoints import flip_one_bit, fuse, state, write_ranks
from tests.peak_memory import peak_of

MEGABYTE = 1 << 20


@pytest.fixture
def small_blocks(monkeypatch):
    for module in (compare, streams):
        monkeypatch.setattr(module, "UNIT", 16)
    monkeypatch.setattr(streams, "BLOCK", 64)


def write(folder, tensors, kind):
    folder.mkdir()
    if kind == "ranks":
        return write_ranks(folder / "all", tensors)
    if kind == "fused":
        tensors = fuse(tensors)
    if kind == "torch":
        torch.save(
            {n: t.t().contiguous().t() for n, t in tensors.items() if t.dim() == 2}
            | {n: t for n, t in tensors.items() if t.dim() != 2},
            folder / "model.pt",
        )
        return folder / "model.pt"
    if kind == "distributed":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("kind", ["plain", "ranks", "fused", "torch", "distributed"])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_of_every_size_find_the_same(kind, threads, tmp_path, small_blocks, monkeypatch):
    wrong = flip_one_bit(flip_one_bit(state(), element=23), element=5)
    wrong = flip_one_bit(wrong, "layers.0.down_proj.weight", element=59)
    paths = write(tmp_path / "a", state(), "plain"), write(tmp_path / "b", wrong, kind)
    small = compare_checkpoints(*paths, threads=threads)
    monkeypatch.undo()
    assert small == compare_checkpoints(*paths)
    assert small.elements_differ == 3
    by_name = {one.name: one for one in small.differing}
    assert by_name["layers.0.k_proj.weight"].difference.count == 2
    assert by_name["layers.0.down_proj.weight"].difference.index == (5, 9)
    one = by_name["layers.0.k_proj.weight"]
    wanted = isobit.bits.digest(state()[one.name]), isobit.bits.digest(wrong[one.name])
    assert one.digests == wanted
    assert compare_checkpoints(*paths, digests=False).differing[0].digests == ("", "")


def test_addresses_are_read_as_files_are(tmp_path, small_blocks):
    storage = fsspec.filesystem("memory")
    for kind in ("plain", "distributed"):
        local = write(tmp_path / kind, state(), kind)
        storage.put(str(local), f"/bucket/{kind}/{local.name}", recursive=local.is_dir())
        address = f"memory://bucket/{kind}/{local.name}"
        assert compare_checkpoints(local, address).equal
        other = write(tmp_path / f"{kind}_wrong", flip_one_bit(state()), kind)
        assert compare_checkpoints(other, address).elements_differ == 1
    torch.save(state(), tmp_path / "model.pt")
    storage.put(str(tmp_path / "model.pt"), "/bucket/model.pt")
    with pytest.raises(isobit.ArgumentError, match="local disk"):
        compare_checkpoints("memory://bucket/model.pt", tmp_path / "model.pt")
    with pytest.raises(isobit.ArgumentError, match="package"):
        compare_checkpoints("nosuchscheme://bucket/model.safetensors", tmp_path / "model.pt")


SIZES = (32, 96)


def test_memory_does_not_grow_with_tensors(tmp_path):
    peaks = []
    for size in (2, *SIZES):  # the first loads what is loaded once
        whole = torch.arange(size * MEGABYTE // 4, dtype=torch.float32).reshape(-1, 1024)
        path = tmp_path / f"{size}.safetensors"
        save_file({"x": whole}, path)
        del whole
        found, peak = peak_of(lambda path=path: compare_checkpoints(path, path))
        assert found.equal
        assert found.bytes == size * MEGABYTE
        peaks.append(peak)
    slope = (peaks[-1] - peaks[-2]) / (SIZES[1] - SIZES[0]) / MEGABYTE
    assert slope < 0.1, peaks  # bytes of memory per byte of the tensor
    assert max(peaks) < 6 * streams.BLOCK, peaks
