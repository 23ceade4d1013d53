"""Theorem: two logs of DebugMode are aligned whatever their lengths, and the place that was changed is named."""

import json
import re
from argparse import Namespace

import pytest
import torch

from isobit import bits
from isobit.cli.compare.dumps import SHOWN
from isobit.cli.compare.dumps import run as run_dumps
from isobit.comparing.dumps import compare_dumps, save_debug_log
from isobit.comparing.dumps.align import align, matching
from isobit.comparing.dumps.debug_log import read_debug_text
from isobit.comparing.dumps.records import Entry
from isobit.errors import ArgumentError
from tests.comparing.dumped_runs import make, plant, watch, write_log


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def options(left, right, rows="all", as_json=False):
    return Namespace(left=left, right=right, rows=rows, json=as_json, quiet=True)


@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("hashes", ["norm", "hash_tensor", ["norm", "hash_tensor"], bits.digest])
def test_twins_are_silent(tmp_path, hashes, modules):
    a = write_log(tmp_path / "a.txt", make(), hashes=hashes, modules=modules)
    b = write_log(tmp_path / "b.txt", make(), hashes=hashes, modules=modules)
    found = compare_dumps(a, b)
    assert found.exit_code == 0
    assert found.pairs == found.entries[0] == found.entries[1] > 20
    assert sum(found.compared.values()) == found.pairs
    assert set(found.aligned) == {"exact" if modules else "sequence"}
    assert bool(found.notes) == (hashes is not bits.digest)


def test_a_planted_weight_is_named(tmp_path):
    a = write_log(tmp_path / "a.txt", make(), hashes=bits.digest)
    b = write_log(tmp_path / "b.txt", plant(make()), hashes=bits.digest)
    found = compare_dumps(a, b)
    assert found.exit_code == 1
    assert found.first.left == "aten::t in Net.layers.1.mlp.up call 0"
    assert all(place.position >= found.first.position for place in found.differing)
    assert not any("layers.0" in place.left for place in found.differing)


def test_another_seed_differs_from_the_first_weight_on(tmp_path):
    a = write_log(tmp_path / "a.txt", make(0))
    b = write_log(tmp_path / "b.txt", make(1))
    found = compare_dumps(a, b)
    assert found.first.left == "aten::t in Net.layers.0.mlp.up call 0"
    assert found.exit_code == 1


def test_two_batch_sizes_are_said_to_differ_in_shape(tmp_path):
    a = write_log(tmp_path / "a.txt", make(), batch=1)
    b = write_log(tmp_path / "b.txt", make(), batch=8)
    found = compare_dumps(a, b)
    assert found.pairs == found.entries[0]
    assert {place.what for place in found.differing} == {"shape"}
    assert "the left may be the first 1 of 8 rows of the right" in found.first.detail
    common = compare_dumps(a, b, rows="common")  # hashes cannot compare rows, and this is said
    assert not common.differing
    assert common.exit_code == 2
    assert "rows cannot be compared by a hash" in common.not_compared[0].reason


def test_common_rows_are_compared_by_saved_values(tmp_path):
    paths = {}
    for name, batch, model in (
        ("one", 1, make()),
        ("eight", 8, make()),
        ("planted", 8, plant(make())),
    ):
        paths[name] = tmp_path / f"{name}.jsonl"
        save_debug_log(watch(model, batch=batch, outputs=True), paths[name], values=True)
    found = compare_dumps(paths["one"], paths["eight"], rows="common")
    assert found.compared == {"bits": found.pairs}
    assert found.shortened > 10
    # Stock kernels may depend on the batch, so only what moves bits is known to be equal.
    assert not any("call 0" in d.left and d.left.startswith("aten::t ") for d in found.differing)
    assert all(d.what == "bits" for d in found.differing)
    found = compare_dumps(paths["eight"], paths["planted"])
    assert found.first.left == "aten::t in Net.layers.1.mlp.up call 0"
    assert (found.first.ulps, found.first.difference.count) == (1, 1)
    assert 0 < found.first.largest < 1e-6


def test_saved_digests_see_what_the_hashes_of_the_same_run_do_not(tmp_path):
    class Turned(torch.nn.Module):
        def __init__(self, sign):
            super().__init__()
            self.sign = sign

        def forward(self, x):
            return x * self.sign

    for name, sign in (("a", 1.0), ("b", -1.0)):
        mode = watch(Turned(sign), outputs=True)
        (tmp_path / f"{name}.txt").write_text(mode.debug_string())
        save_debug_log(mode, tmp_path / f"{name}.jsonl")
    by_hash = compare_dumps(tmp_path / "a.txt", tmp_path / "b.txt")
    assert by_hash.exit_code == 0
    assert "no difference was seen" in by_hash.notes[0]
    by_digest = compare_dumps(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert by_digest.first.left == "aten::mul.Tensor in Turned call 0"
    assert not by_digest.notes
    mixed = compare_dumps(tmp_path / "a.txt", tmp_path / "b.jsonl")  # by what both have
    assert mixed.compared == {"hash": 1}


@pytest.mark.parametrize(
    ("hashes", "blind_to"),
    [("norm", ("sign", "rows")), ("hash_tensor", ("rows", "sign")), (bits.digest, ())],
)
def test_which_differences_a_hash_misses(hashes, blind_to):
    """Why equal hashes of DebugMode are not equal bits: shown with the installed torch."""
    from torch.utils._debug_mode import DebugMode

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with DebugMode() as mode, DebugMode.log_tensor_hashes(hashes):
        _ = x.clone(), x.neg(), x[[1, 0]]
    entries, _ = read_debug_text(mode.debug_string())
    found = {e.operator: e.hashes for e in entries}
    same = {
        "sign": found["aten::neg"] == found["aten::clone"],
        "rows": found["aten::index.Tensor"] == found["aten::clone"],
    }
    assert {name for name, is_same in same.items() if is_same} == set(blind_to)


@pytest.mark.parametrize("modules", [True, False])
def test_an_extra_operator_is_listed_and_the_rest_compared(tmp_path, modules):
    """DebugMode's own comparison raises for these: "Log lengths don't match"."""
    a = write_log(tmp_path / "a.txt", make(), modules=modules)
    b = write_log(tmp_path / "b.txt", make(extra=True), modules=modules)
    found = compare_dumps(a, b)
    assert not found.only_left
    assert len(found.only_right) == 6
    assert all("aten::neg" in name for name in found.only_right)
    assert found.pairs == found.entries[0]
    assert not found.differing
    assert found.exit_code == 1  # the runs are not the same program
    planted = write_log(
        tmp_path / "c.txt", plant(make(extra=True)), modules=modules, hashes=bits.digest
    )
    clean = write_log(tmp_path / "d.txt", make(), modules=modules, hashes=bits.digest)
    first = compare_dumps(clean, planted).first
    assert first.left.startswith("aten::t")
    assert not modules or "layers.1.mlp.up" in first.left


def test_what_was_computed_in_another_way_is_shown_before_the_first_difference(tmp_path):
    a = write_log(tmp_path / "a.txt", make(), hashes=bits.digest)
    lines = a.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if "aten::relu" in line)
    lines[at] = lines[at].replace("aten::relu", "my::relu")
    changed = "\n".join(lines[: at + 1]) + re.sub(
        r"'\w{32}'", f"'{0:032x}'", "\n".join(["", *lines[at + 1 :]])
    )
    (tmp_path / "b.txt").write_text(changed)
    found = compare_dumps(a, tmp_path / "b.txt")
    assert found.before_first == (
        "left: aten::relu in Net.layers.0.mlp call 0",
        "right: my::relu in Net.layers.0.mlp call 0",
    )
    assert found.first.left == "aten::view in Net.layers.0.mlp.down call 0"


def test_a_renamed_module_is_aligned_and_both_names_shown(tmp_path):
    a = write_log(tmp_path / "a.txt", make(), hashes=bits.digest)
    b = write_log(
        tmp_path / "b.txt", plant(make(inner="ffn"), "layers.1.ffn.up.weight"), hashes=bits.digest
    )
    found = compare_dumps(a, b)
    assert found.pairs == found.entries[0] == found.entries[1]
    inside = sum(".mlp" in entry.module for entry in read_debug_text(a.read_text())[0])
    assert found.aligned == {"exact": found.pairs - inside, "renamed": inside}
    assert found.first.left == "aten::t in Net.layers.1.mlp.up call 0"
    assert found.first.right == "aten::t in Net.layers.1.ffn.up call 0"


def test_lengths_that_do_not_match_are_explained(tmp_path, capsys):
    """As 313 against 247: some layers, some calls and a root's name are different."""
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    write_log(a, make(layers=12))
    wrapped = torch.nn.Sequential(make(layers=10))
    write_log(b, wrapped)
    found = compare_dumps(a, b)
    sizes = found.entries
    assert sizes[0] != sizes[1]
    assert found.pairs + len(found.only_left) == sizes[0]
    assert found.pairs + len(found.only_right) == sizes[1]
    assert {name.split("layers.")[1][:2] for name in found.only_left} == {"10", "11"}
    assert run_dumps(options(a, b)) == found.exit_code == 1
    shown = capsys.readouterr().out
    assert f"only in the left dump: {len(found.only_left)}" in shown
    assert f"and {len(found.only_left) - SHOWN} more; --json lists all" in shown


def test_a_group_with_another_number_of_calls_is_not_paired_by_number():
    def calls(*shapes):
        from isobit.comparing.dumps.records import Output

        return [
            Entry("m", "aten::mm", at, at, outputs=(Output("f32", shape),))
            for at, shape in enumerate(shapes)
        ]

    pairs = align(calls((1, 2), (3, 4)), calls((9, 9), (1, 2), (3, 4)))
    assert [(p.left.call, p.right.call) for p in pairs] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("model.layers.3.mlp", "module.model.layers.3.mlp"),
        ("model.layers.3.mlp", "_orig_mod.model.layers.3.mlp"),
        ("model.layers.3.mlp", "model.layer_3.mlp"),
        ("Model.layers.3.mlp", "OptimizedModule._orig_mod.layers.3.mlp"),
    ],
)
def test_names_of_wrappers_and_layers_are_normalised(left, right):
    (pair,) = align([Entry(left, "aten::add.Tensor")], [Entry(right, "aten::add_")])
    assert pair.alignment == "names"
    assert align([Entry(left, "aten::add")], [Entry(right, "aten::mul")]) == ()


def test_sequences_are_aligned_with_the_fewest_edits():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        a, b = (torch.randint(0, 4, (n,), generator=generator).tolist() for n in (9, 12))
        found = matching(a, b)
        assert all(a[i] == b[j] for i, j in found)
        assert len(found) == longest_common(a, b)


def longest_common(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        above, row = row, [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(row[j], above[j + 1]))
    return row[-1]


def test_the_command_prints_text_and_json(tmp_path, capsys):
    a = write_log(tmp_path / "a.txt", make())
    b = write_log(tmp_path / "b.txt", make(1))
    assert run_dumps(options(a, a)) == 0
    assert "no difference seen at" in capsys.readouterr().out
    assert run_dumps(options(a, b)) == 1
    assert "first difference: aten::t in Net.layers.0.mlp.up call 0" in capsys.readouterr().out
    assert run_dumps(options(a, b, as_json=True)) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["exit"] == 1
    assert record["first"]["left"] == "aten::t in Net.layers.0.mlp.up call 0"
    assert len(record["comparison"]["differing"]) > 10


def test_nothing_in_common_is_no_verdict(tmp_path, capsys):
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text("    aten::neg(t: f32[2])  ->  t: f32[2]  # {'hash': 1.0}")
    b.write_text("    aten::mul(t: f32[2])  ->  t: f32[2]  # {'hash': 1.0}")
    assert run_dumps(options(a, b)) == 2
    assert "nothing was aligned; 2 entries have no partner" in capsys.readouterr().out
    b.write_text("    aten::neg(t: f32[2])  ->  t: f32[2]  # {'hash': 7}")
    found = compare_dumps(a, b)
    assert "hashes of different kinds" in found.not_compared[0].reason
    assert found.exit_code == 2
    b.write_text("    aten::neg(t: f32[2])  ->  t: f32[2]")
    assert "right dump has neither" in compare_dumps(a, b).not_compared[0].reason
    a.write_text(b.read_text())
    assert compare_dumps(a, b).exit_code == 2
    with pytest.raises(ArgumentError, match="rows='all'"):
        compare_dumps(a, b, rows="some")


def test_save_debug_log_requires_a_run(tmp_path):
    from torch.utils._debug_mode import DebugMode

    with pytest.raises(ArgumentError, match="recorded calls"):
        save_debug_log(DebugMode(), tmp_path / "a")
    with pytest.raises(ArgumentError, match="recorded outputs"):
        save_debug_log(watch(make()), tmp_path / "a", values=True)
