"""Theorem: what a comparison finds does not depend on the size of its blocks, nor its memory on that of tensors."""

import itertools
import pickle
import random
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import isobit
from isobit.comparing.checkpoints import compare, streams
from isobit.comparing.checkpoints.compare import compare_checkpoints
from tests.comparing.made_checkpoints import flip_one_bit, fuse, state, write_ranks
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


def write_chunks(folder, name, chunks, whole):
    """Write a folder of torch.distributed.checkpoint whose tensor has these chunks: offsets and sizes."""
    folder.mkdir(parents=True)
    places, spans = {}, []
    with open(folder / "__0_0.distcp", "wb") as file:
        for offsets, sizes in chunks:
            start = file.tell()
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            torch.save(whole[slices].clone(memory_format=torch.contiguous_format), file)
            info = _StorageInfo("__0_0.distcp", start, file.tell() - start)
            places[MetadataIndex(name, torch.Size(offsets))] = info
            spans.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, spans)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({name: entry}, storage_data=places)))
    return folder


def cuts_of(draw, shape):
    """Draw a grid of chunks: every dimension is cut at most twice."""
    ends = [sorted({0, n, *(draw.randint(0, n) for _ in range(2))}) for n in shape]
    spans = itertools.product(*(itertools.pairwise(each) for each in ends))
    return [(tuple(a for a, _ in one), tuple(b - a for a, b in one)) for one in spans]


@pytest.mark.parametrize("block", [4, 16, 64, 1 << 20])
@pytest.mark.sweep(2)
def test_chunks_of_every_grid_are_read_as_the_whole(block, tmp_path, small_blocks, monkeypatch):
    """Rows smaller and larger than a block; one bit that differs is found at its index."""
    monkeypatch.setattr(streams, "BLOCK", block)
    draw = random.Random(block)
    for number, shape in enumerate([(3, 5, 4), (1, 40), (40, 1), (2, 3, 2, 3), (17,), (2, 1, 9)]):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            make = torch.Generator().manual_seed(number)
            whole = (torch.randn(shape, generator=make) * 3).to(dtype)
            home = tmp_path / f"{number} {dtype}"
            folder = write_chunks(home / "a", "x", cuts_of(draw, shape), whole)
            save_file({"x": whole}, home / "plain.safetensors")
            assert compare_checkpoints(folder, home / "plain.safetensors").equal
            index = tuple(draw.randrange(n) for n in shape)
            other = whole.clone()
            other[index] = -1 - whole[index] if dtype.is_floating_point else ~whole[index]
            folder = write_chunks(home / "b", "x", cuts_of(draw, shape), other)
            found = compare_checkpoints(folder, home / "plain.safetensors")
            assert found.elements_differ == 1
            assert found.differing[0].difference.index == index


@pytest.mark.parametrize("block", [8, 64])
def test_shards_of_ranks_with_wide_rows(block, tmp_path, small_blocks, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", block)
    whole = write(tmp_path / "a", state(), "plain")
    for save, ending in ((save_file, "safetensors"), (torch.save, "pt")):
        for wrong, count in ((state(), 0), (flip_one_bit(state(), element=23), 1)):
            path = write_ranks(tmp_path / f"{ending}{count}", wrong, save=save, ending=ending)
            assert compare_checkpoints(whole, path).elements_differ == count


SIZES = (32, 96)


def halves(folder, whole):
    """Shards of two ranks, cut along the second dimension."""
    for rank, part in enumerate(whole.chunk(2, 1)):
        (folder / f"rank_{rank}").mkdir(parents=True)
        save_file({"down_proj.weight": part.contiguous()}, folder / f"rank_{rank}/x.safetensors")
    return folder


def columns(folder, whole):
    rows, size = whole.shape
    spans = [((0, at), (rows, size // 4)) for at in range(0, size, size // 4)]
    return write_chunks(folder, "down_proj.weight", spans, whole)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("shards", [None, halves, columns])
@pytest.mark.sweep(2)
def test_memory_does_not_grow_with_tensors(shards, dtype, rows, tmp_path):
    """Neither with the number of rows of 4 KiB, nor, of 4 rows, with their size."""
    peaks = []
    for size in (2, *SIZES):  # the first loads what is loaded once
        whole = torch.arange(size * MEGABYTE // 4, dtype=torch.float32)
        if dtype is torch.bool:
            whole = whole.view(torch.uint8).bitwise_and_(1).view(torch.bool)
        whole = whole.reshape((rows, -1) if rows else (-1, 4096 // dtype.itemsize))
        path = other = tmp_path / f"{size}.safetensors"
        save_file({"down_proj.weight": whole}, path)
        if shards is not None:
            other = shards(tmp_path / str(size), whole)
        del whole
        found, peak = peak_of(lambda a=path, b=other: compare_checkpoints(a, b))
        assert found.equal
        assert found.bytes == size * MEGABYTE
        peaks.append(peak)
    slope = (peaks[-1] - peaks[-2]) / (SIZES[1] - SIZES[0]) / MEGABYTE
    assert slope < 0.1, peaks  # bytes of memory per byte of the tensor
    assert max(peaks) < 6 * streams.BLOCK, peaks


@pytest.mark.parametrize("shards", [None, halves])
def test_bools_that_are_neither_are_refused(shards, tmp_path):
    """Also the last one, and in shards; torch reads such a byte as it likes."""
    whole = torch.ones(64, 4096, dtype=torch.bool)
    save_file({"down_proj.weight": whole}, tmp_path / "right.safetensors")
    wrong = last = tmp_path / "wrong.safetensors"
    if shards is None:
        save_file({"down_proj.weight": whole}, wrong)
    else:
        wrong = shards(tmp_path / "wrong", whole)
        last = wrong / "rank_1/x.safetensors"
    assert compare_checkpoints(tmp_path / "right.safetensors", wrong).equal
    with last.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\2")
    with pytest.raises(isobit.ArgumentError, match="zeros and ones"):
        compare_checkpoints(tmp_path / "right.safetensors", wrong)
