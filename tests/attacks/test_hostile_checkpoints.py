"""Theorem: a checkpoint of somebody else's runs no code, reads nothing outside, and raises one error if it lies."""

import io
import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from isobit.cli import main
from isobit.comparing.checkpoints.compare import compare_checkpoints
from isobit.comparing.checkpoints.readers import MetadataReader, is_inside
from isobit.errors import ArgumentError

READABLE = (ArgumentError, OSError)


class Bomb:
    """Touches a file if it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, path)
    return path


@pytest.fixture
def folder(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.arange(6.0), "n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def refused(path, good):
    with pytest.raises(READABLE) as error:
        compare_checkpoints(path, good)
    return str(error.value)


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_truncation_of_a_safetensors_file_is_refused(good, tmp_path):
    whole = good.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        refused(cut, good)
    cut.write_bytes(whole + b"\0")
    assert "bytes of no tensor" in refused(cut, good)


LIES = {
    "header of 2^63 bytes": (b"{}", b"", 1 << 63),
    "header of 101 MB that is not there": (b"{}", b"", 101_000_000),
    "not JSON": (b"\xff\xfe{", b"", None),
    "a list": ([], b"", None),
    "nested too deeply": (b"[" * 100_000 + b"]" * 100_000, b"", None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, None),
    "a negative offset": ({"a": entry(offsets=(-8, 0))}, b"\0" * 8, None),
    "an offset past the end": ({"a": entry(offsets=(8, 16))}, b"\0" * 8, None),
    "a shape that needs more": ({"a": entry(shape=(3,))}, b"\0" * 8, None),
    "a shape that overflows": ({"a": entry(shape=(1 << 62, 4))}, b"\0" * 8, None),
    "a negative shape": ({"a": entry(shape=(-1, -2))}, b"\0" * 8, None),
    "a shape of floats": ({"a": entry(shape=(2.0,))}, b"\0" * 8, None),
    "a shape of bools": ({"a": entry(shape=(True,), offsets=(0, 4))}, b"\0" * 4, None),
    "65 dimensions": ({"a": entry(shape=(1,) * 65, offsets=(0, 4))}, b"\0" * 4, None),
    "an unknown dtype": ({"a": entry("F4")}, b"\0" * 8, None),
    "a dtype that is a list": ({"a": entry(["F32"])}, b"\0" * 8, None),
    "shared bytes": ({"a": entry(), "b": entry()}, b"\0" * 8, None),
    "a hole": ({"a": entry(), "b": entry(offsets=(9, 17))}, b"\0" * 17, None),
    "a name twice": (b'{"a":' + json.dumps(entry()).encode() + b',"a":{}}', b"\0" * 8, None),
    "metadata that is a list": ({"__metadata__": []}, b"", None),
    "booleans that are neither": ({"a": entry("BOOL", (1,), (0, 1))}, b"\2", None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie, good, tmp_path):
    header, data, length = LIES[lie]
    path = write(tmp_path / "lie.safetensors", header, data, length)
    refused(path, path if lie.startswith("booleans") else good)


def test_a_huge_header_of_a_sparse_file_is_refused(good, tmp_path):
    path = tmp_path / "sparse.safetensors"
    write(path, b"{}", length=1 << 33)
    with open(path, "r+b") as file:
        file.truncate(1 << 34)
    assert "header of" in refused(path, good)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("ending", ["pt", "bin", "ckpt"])
def test_code_in_a_torch_file_does_not_run(zipped, ending, good, tmp_path):
    path = tmp_path / f"bomb.{ending}"
    content = {"a": torch.ones(1), "b": Bomb(tmp_path / "ran")}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert "mkdir" in refused(path, good)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    refused(path, good)
    assert not (tmp_path / "ran").exists()
    torch.load(torch.save({"b": Bomb(tmp_path / "ran")}, path) or path, weights_only=False)
    assert (tmp_path / "ran").exists()  # the bomb works


def test_a_pickled_module_is_refused_by_name(good, tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    assert main.main(["compare", "checkpoints", str(tmp_path / "model.pt"), str(good), "-q"]) == 2
    shown = capsys.readouterr().err
    assert "torch.nn.modules.linear.Linear" in shown
    assert "model.pt" in shown


def test_damaged_torch_files_are_refused(good, tmp_path):
    torch.save({"a": torch.arange(100.0)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in range(0, len(whole), 41):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        refused(tmp_path / "cut.pt", good)


def test_a_container_that_contains_itself_is_refused(good, tmp_path):
    loop = {}
    loop["again"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    assert "nested" in refused(tmp_path / "loop.pt", good)


def test_names_that_collide_are_refused(good, tmp_path):
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    assert "twice" in refused(tmp_path / "twice.pt", good)


def test_an_expanded_tensor_does_not_fill_the_memory(good, tmp_path):
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "wide.pt")
    refused(tmp_path / "wide.pt", good)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/../../x.safetensors"])
def test_an_index_that_leads_out_is_refused(file, good, tmp_path):
    shutil.copy(good, tmp_path / "secret.safetensors")
    (tmp_path / "m").mkdir()
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file, "b": file}}))
    assert "in this folder" in refused(tmp_path / "m", good)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_not_one_is_refused(content, good, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    refused(index, good)


def test_an_index_whose_tensor_is_missing_is_refused(good, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": good.name, "c": good.name}}))
    assert "no c" in refused(index, good)


def test_devices_pipes_and_loops_are_refused_and_links_to_files_are_read(good, tmp_path):
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    for name in ("zero", "pipe", "loop"):
        refused(tmp_path / f"{name}.safetensors", good)
    (tmp_path / "linked.safetensors").symlink_to(good)
    assert compare_checkpoints(tmp_path / "linked.safetensors", good).equal


def test_code_in_distributed_metadata_does_not_run(folder, good, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    assert "mkdir" in refused(folder, good)
    for opcode in (b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"ctorch\nload\n."):
        (folder / ".metadata").write_bytes(opcode)
        assert "GLOBAL" in refused(folder, good)
    assert not (tmp_path / "ran").exists()


def test_getattr_in_distributed_metadata_names_a_member_of_its_enum_and_nothing_else(folder, good):
    # Python 3.11.0 to 3.11.3 pickle an enum's member as getattr(class, name); later ones as class(value).
    enum = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    member = b"cbuiltins\ngetattr\n(" + enum + b"S'TORCH_CONTIGUOUS_FORMAT'\ntR."
    found = MetadataReader(io.BytesIO(member)).load()
    assert found.arguments == ("TORCH_CONTIGUOUS_FORMAT",)
    hostile = (
        b"cbuiltins\ngetattr\n(ctorch\nfloat32\nS'__class__'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__'\ntR.",
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nS'__globals__'\ntR.",
    )
    for pickled in hostile:
        (folder / ".metadata").write_bytes(pickled)
        assert "GLOBAL builtins.getattr" in refused(folder, good)


def test_code_in_a_distributed_value_does_not_run(tmp_path, good):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {"a": torch.ones(1), "n": Bomb(tmp_path / "ran")}
        dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "mkdir" in refused(tmp_path / "dcp", good)
    assert not (tmp_path / "ran").exists()


def change(folder, edit):
    """Edit the metadata as torch reads it, and write it again."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def lead_out(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def past_the_end(metadata):
    for place in metadata.storage_data.values():
        place.length += 1 << 40


def larger(metadata):
    metadata.state_dict_metadata["a"].size = torch.Size([1 << 40])


def larger_chunk(metadata):
    larger(metadata)
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([1 << 40])


def overlapping(metadata):
    chunks = metadata.state_dict_metadata["a"].chunks
    chunks[0].sizes = torch.Size([3])
    chunks.append(chunks[0])


def compressed(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    "edit",
    [lead_out, past_the_end, larger, larger_chunk, overlapping, compressed],
    ids=lambda f: f.__name__,
)
def test_distributed_metadata_that_lies_is_refused(edit, folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    change(folder, lambda metadata: None)
    assert compare_checkpoints(folder, other).equal
    change(folder, edit)
    refused(folder, other)


def test_damaged_distributed_metadata_is_refused(folder, good):
    whole = (folder / ".metadata").read_bytes()
    for size in range(0, len(whole) - 1, 7):
        (folder / ".metadata").write_bytes(whole[:size])
        refused(folder, good)


def test_paths_inside_a_folder():
    assert is_inside("__0_0.distcp")
    assert is_inside("a/b.distcp")
    assert not any(map(is_inside, ("", "..", "../a", "/a", "a/../../b", "..\\a", "C:\\a")))


def test_names_cannot_control_the_terminal(tmp_path, capsys):
    for k in range(2):
        torch.save({"\x1b[2Jevil\nequal: 0": torch.full((1,), float(k))}, tmp_path / f"{k}.pt")
    assert (
        main.main(["compare", "checkpoints", str(tmp_path / "0.pt"), str(tmp_path / "1.pt"), "-q"])
        == 1
    )
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert not any(line.startswith("equal") for line in shown.splitlines())
