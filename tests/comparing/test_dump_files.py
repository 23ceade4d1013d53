"""Theorem: tensor files of two runs are compared bit by bit, and no file can run code, hang or forge a line."""

import os
import pickle
from argparse import Namespace

import pytest
import torch

from isobit.cli.compare.dumps import run as run_dumps
from isobit.comparing.dumps import compare_dumps
from isobit.comparing.dumps.compare import compare_values
from isobit.comparing.dumps.debug_log import read_debug_text
from isobit.comparing.dumps.load import read_tags
from isobit.errors import ArgumentError
from isobit.foundation.files import write_text


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_ulp_up(tensor, at=0):
    changed = tensor.clone().reshape(-1)
    changed[at] = torch.nextafter(changed[at], torch.tensor(float("inf")))
    return changed.reshape(tensor.shape)


def dump_sglang(folder, change=None, steps=2, ranks=2, first=0, key="step", rows=4):
    """Write files named and filled as SGLang's dumper does."""
    folder.mkdir()
    index = 0
    for step in range(first, first + steps):
        for layer in range(2):
            for rank in range(ranks):
                index += 1
                value = numbers(4, 3, seed=10 * layer + step - first)[:rows]
                tags = {key: step, "rank": rank, "dump_index": index, "name": "attn_output"}
                tags |= {"recompute_status": "disabled", "layer_id": layer}
                if change == (step, layer, rank):
                    value = one_ulp_up(value, 5)
                name = "___".join(f"{k}={v}" for k, v in tags.items()) + ".pt"
                torch.save({"value": value, "meta": {**tags, "world_size": ranks}}, folder / name)
    return folder


def test_dumper_files_are_compared_and_the_changed_one_is_named(tmp_path):
    a, b = dump_sglang(tmp_path / "a"), dump_sglang(tmp_path / "b")
    found = compare_dumps(a, b)
    assert (found.exit_code, found.compared, found.formats[0]) == (0, {"bits": 8}, "SGLang dumper")
    c = dump_sglang(tmp_path / "c", change=(1, 0, 1))
    (place,) = compare_dumps(a, c).differing
    assert place.left == place.right == "attn_output layer_id=0 rank=1 step=1"
    assert (place.ulps, place.difference.index, place.difference.count) == (1, (1, 2), 1)


def test_dumper_files_of_other_steps_ranks_and_versions_are_aligned(tmp_path):
    a = dump_sglang(tmp_path / "a")
    older = dump_sglang(tmp_path / "older", key="forward_pass_id")
    assert compare_dumps(a, older).aligned == {"names": 8}
    assert compare_dumps(a, older).exit_code == 0
    shifted = compare_dumps(a, dump_sglang(tmp_path / "shifted", first=5))
    assert (shifted.aligned, shifted.exit_code) == ({"sequence": 8}, 0)
    alone = compare_dumps(a, dump_sglang(tmp_path / "alone", ranks=1))
    assert (alone.pairs, len(alone.only_left), alone.exit_code) == (4, 4, 1)
    assert all("rank=1" in name for name in alone.only_left)


def test_rows_are_compared_only_when_asked(tmp_path):
    a, b = dump_sglang(tmp_path / "a"), dump_sglang(tmp_path / "b", rows=1)
    found = compare_dumps(a, b)
    assert {place.what for place in found.differing} == {"shape"}
    assert "the right may be the first 1 of 4 rows of the left" in found.first.detail
    common = compare_dumps(a, b, rows="common")
    assert (common.exit_code, common.shortened) == (0, 8)
    changed = dump_sglang(tmp_path / "c", change=(0, 1, 0))  # element 5 is in the second row
    assert compare_dumps(changed, b, rows="common").exit_code == 0
    assert compare_dumps(changed, a, rows="common").first.what == "bits"


def test_names_with_slashes_and_underscores_are_read():
    from pathlib import Path

    assert read_tags(Path("exp/step=0___rank=0___name=a/b.pt"))["name"] == "a/b"
    assert read_tags(Path("rank=0___name=a___b___dump_index=3.pt"))["name"] == "a___b"
    assert read_tags(Path("model.layers.0.pt")) == {}


def save_folder(folder, tensors, kind):
    folder.mkdir()
    for name, tensor in tensors.items():
        if kind == "pt":
            torch.save(tensor, folder / f"{name}.pt")
        else:
            safetensors = pytest.importorskip("safetensors.torch")
            safetensors.save_file({"tensor": tensor}, folder / f"{name}.safetensors")
    return folder


@pytest.mark.parametrize("kinds", [("pt", "pt"), ("pt", "safetensors")])
def test_folders_of_tensors(tmp_path, kinds):
    tensors = {f"model.layers.{i}.mlp": numbers(2, 3, seed=i) for i in range(11)}
    tensors |= {"model.layers.2.mlp@1": numbers(2, 3), "head": numbers(4).bfloat16()}
    a = save_folder(tmp_path / "a", tensors, kinds[0])
    b = save_folder(tmp_path / "b", tensors, kinds[1])
    found = compare_dumps(a, b)
    assert (found.exit_code, found.pairs, found.ordered) == (0, 13, False)
    changed = {
        name.replace("layers.", "layer_"): one_ulp_up(value) if "2.mlp" in name else value
        for name, value in tensors.items()
    }
    c = save_folder(tmp_path / "c", changed, kinds[1])
    found = compare_dumps(a, c)
    assert [place.left for place in found.differing] == [
        "model.layers.2.mlp",
        "model.layers.2.mlp call=1",
    ]
    assert found.aligned == {"exact": 1, "names": 12}


def test_one_file_of_tensors_and_dtypes(tmp_path):
    values = {"a": numbers(3), "b": torch.arange(3), "c": numbers(3).to(torch.complex64)}
    other = {"a": numbers(3).bfloat16(), "b": torch.tensor([0, 1, 5]), "c": values["c"].conj()}
    torch.save(values, tmp_path / "a.pt")
    torch.save(other, tmp_path / "b.pt")
    found = {
        place.left: place for place in compare_dumps(tmp_path / "a.pt", tmp_path / "b.pt").differing
    }
    assert found["a"].detail == "dtype float32 and bfloat16"
    assert 0 < found["a"].largest < 0.01
    assert (found["b"].ulps, found["b"].largest) == (None, 3.0)
    assert found["c"].difference.count == 3  # +0 and -0 of the imaginary parts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ulps_of_the_largest_difference(dtype):
    bits_of = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    near = torch.tensor([1, 100, 7], dtype=bits_of).view(dtype)
    far = torch.tensor([2, 130, 7], dtype=bits_of).view(dtype)
    assert compare_values(near, far, False).ulps == 30
    assert compare_values(near, -far, False).ulps == 230
    assert (
        compare_values(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype), False).ulps == 0
    )
    nan = torch.tensor([float("nan")], dtype=dtype)
    found = compare_values(nan, torch.ones(1, dtype=dtype), False)
    assert (found.what, found.ulps, found.largest) == ("bits", None, None)
    assert compare_values(nan, nan.clone(), False).what == ""
    large = torch.finfo(dtype).max
    ends = compare_values(
        torch.tensor([large], dtype=dtype), torch.tensor([-large], dtype=dtype), False
    )
    assert ends.ulps > 2 ** (8 * dtype.itemsize - 2)


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_pickle_with_code_does_not_run(tmp_path, capsys):
    folder = save_folder(tmp_path / "a", {"good": numbers(2), "evil": numbers(2)}, "pt")
    other = save_folder(tmp_path / "b", {"good": numbers(2), "evil": numbers(2)}, "pt")
    mark = tmp_path / "ran"
    for write in (
        lambda p: torch.save(Runs(str(mark)), p),
        lambda p: p.write_bytes(pickle.dumps(Runs(str(mark)))),
    ):
        write(folder / "evil.pt")
        found = compare_dumps(folder, other)
        assert not mark.exists()
        assert (found.pairs, found.exit_code) == (1, 2)
        assert "evil.pt" in found.unreadable[0].where
    assert run_dumps(Namespace(left=folder, right=other, rows="all", json=False, quiet=True)) == 2
    assert "unreadable: 1" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("how", ["empty", "truncated", "noise", "a pipe", "a lie"])
def test_damaged_files_are_named(tmp_path, suffix, how):
    kind = suffix[1:]
    a = save_folder(tmp_path / "a", {"good": numbers(2), "bad": numbers(64)}, kind)
    b = save_folder(tmp_path / "b", {"good": numbers(2), "bad": numbers(64)}, kind)
    bad = a / f"bad{suffix}"
    whole = bad.read_bytes()
    bad.unlink()
    if how == "a pipe":
        os.mkfifo(bad)
    elif how == "a lie" and suffix == ".pt":
        torch.save(torch.zeros(1).expand(1 << 40), bad)
    elif how == "a lie":
        bad.write_bytes(whole.replace(b"[64]", b"[65]"))
    else:
        bad.write_bytes(
            {"empty": b"", "truncated": whole[: len(whole) - 40], "noise": b"\x80\x05" * 99}[how]
        )
    found = compare_dumps(a, b)
    assert found.compared == {"bits": 1}
    assert found.exit_code == 2
    assert "bad" in str((*found.unreadable, *found.not_compared))


@pytest.mark.parametrize(
    ("text", "is_log"),
    [
        ("", False),
        ("no log at all", False),
        ("\x00\x01\x02" * 100, False),
        ('{"op": 3', False),
        ('{"op": "x", "module": "", "call": 0, "shape": [["a"]], "dtype": ["f32"]}', False),
        ('{"op":' + "[" * 100_000, False),
        ("    aten::neg(t: f32[2])  # {'hash': " + "(" * 50_000 + ")" * 50_000 + "}", True),
        ("    aten::neg(t: f32[2])  # {'hash': __import__('os').getcwd()}", True),
        ("    aten::neg(t: f32[2])  ->  t: f32[99999999999999999999999]", True),
    ],
    ids=range(9),
)
def test_hostile_logs_are_read_or_refused(tmp_path, text, is_log):
    path = tmp_path / "a.txt"
    write_text(path, text)
    if is_log:
        found = compare_dumps(path, path)
        assert found.pairs == found.entries[0] == 1
        assert not found.differing
    else:
        with pytest.raises(ArgumentError, match="without entries"):
            compare_dumps(path, path)


def test_a_name_cannot_forge_a_line(tmp_path, capsys):
    evil = "x\x1b[2J\nno difference seen at 9 of 9 aligned places\u202e"
    line = "    [nn.Mod] m\x1b[31m\r\n      aten::neg(t: f32[2])  ->  t: f32[2]  # {'hash': 1.0}"
    (tmp_path / "a.txt").write_text(line)
    (tmp_path / "b.txt").write_text(line.replace("1.0", "2.0"))
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_folder(tmp_path / name, {}, "pt")
        torch.save(torch.tensor([value]), tmp_path / name / f"{evil}.pt")
    for left, right in (("a.txt", "b.txt"), ("a", "b")):
        sides = {"left": tmp_path / left, "right": tmp_path / right}
        words = Namespace(**sides, rows="all", json=False, quiet=True)
        assert run_dumps(words) == 1
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert not any(row.startswith("no difference") for row in shown.splitlines())


def test_what_is_no_dump_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArgumentError, match="remedy"):
            compare_dumps(path, path)


def test_torch_function_calls_and_kernels_are_placed():
    text = """    [nn.Mod] Net
      [nn.Mod] Net.up
      torch._C._nn.linear(t: f32[2, 4])  ->  t: f32[2, 8]
          aten::addmm(t: f32[8])  ->  t: f32[2, 8]  # {'hash': 4.9}
    <method-wrapper '__get__' of getset_descriptor object at 0x7fcb3815f400>(t: f32[2])  ->  True
      [triton] fused_0(a=t: f32[2])
      # pre-kernel hashes: {a: 1.0}
      # post-kernel hashes: {a: 1.0, b: nan}

      redistribute_input(1, S(0) -> R)
    [annotate] here
"""
    entries, unreadable = read_debug_text(text)
    assert unreadable == ()
    assert [(e.module, e.operator) for e in entries] == [
        ("Net.up", "torch._C._nn.linear"),
        ("Net.up", "aten::addmm"),
        ("Net", "<method-wrapper '__get__' of getset_descriptor object>"),
        ("Net", "fused_0"),
        ("Net", "redistribute_input"),
    ]
    assert entries[3].hashes == (("a", "1.0"), ("b", "nan"))


@pytest.mark.parametrize(
    "keys",
    [(0, 1), (1, "1"), ("x", 2), (None, "None"), ((0, 1), "(0, 1)"), (b"a", "b'a'")],
    ids=str,
)
def test_no_key_hides_the_tensor_of_another(tmp_path, keys):
    values = [numbers(2, 3, seed=at) for at in range(2)]
    torch.save(dict(zip(keys, values, strict=True)), tmp_path / "a.pt")
    assert compare_dumps(tmp_path / "a.pt", tmp_path / "a.pt").exit_code == 0
    for at in range(2):
        changed = [one_ulp_up(v) if i == at else v for i, v in enumerate(values)]
        torch.save(dict(zip(keys, changed, strict=True)), tmp_path / "b.pt")
        assert compare_dumps(tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 1


def test_a_key_with_a_dot_hides_no_nested_one(tmp_path):
    values = numbers(3), numbers(3, seed=1)
    for name, last in (("a", values[1]), ("b", one_ulp_up(values[1]))):
        torch.save([{"x.y": values[0], "x": {"y": last}}], tmp_path / f"{name}.pt")
    assert compare_dumps(tmp_path / "a.pt", tmp_path / "b.pt").exit_code == 1
