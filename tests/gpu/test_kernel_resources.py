"""Registers, spills and shared memory are read from compiled code: default tiles do not spill, others are seen to."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import isobit
from benchmarks import kernel_resources
from benchmarks.kernel_launches import Recording, empty
from benchmarks.kernel_resources import measure, read_assembly
from isobit.certifying.running.backends import compiler_for
from isobit.foundation import backends
from isobit.library.on_gpu.twins import source
from isobit.ops.gpu.executors import prepare
from isobit.ops.gpu.launching import run
from isobit.ops.linear import tiles

BF16 = torch.bfloat16


@triton.jit
def subtract_largest(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, value - tl.max(value, 0))


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_resources, "KEPT", tmp_path)


def launch_of(target, function, *given):
    backend = Recording(target)
    with backends.use(backend):
        function(*given)
    (launch,) = backend.launches
    return launch


def largest(target, size):
    x, y = torch.empty(size), torch.empty(size)
    return launch_of(target, lambda: run(subtract_largest, (1,), x, y, warps=1, BLOCK=size))


def test_a_kernel_that_spills_is_seen(tmp_path):
    few, many = (measure(largest("sm_90", size), "sm_90") for size in (1024, 16384))
    assert few.spills == 0
    assert few.registers < 100
    assert many.spills > 256
    assert len(list(tmp_path.iterdir())) == 2
    assert measure(largest("sm_90", 16384), "sm_90", only_kept=True) == many
    assert measure(largest("sm_80", 1024), "sm_80", only_kept=True) is None


def test_amd_code_is_compiled_and_read():
    found = measure(largest("gfx942", 1024), "gfx942")
    assert 16 <= found.registers < 100
    assert (found.spills, found.stack) == (0, 0)


def test_spills_of_amd_code_are_read():
    text = ".vgpr_count: 256\n.vgpr_spill_count: 3\n.private_segment_fixed_size: 16\n"
    found = read_assembly(text, 1024)
    assert (found.registers, found.spills, found.stack, found.shared) == (256, 12, 16, 1024)


@pytest.mark.parametrize(("stages", "spills"), [(2, False), (3, True)])
@pytest.mark.sweep(1)
def test_the_tile_of_many_rows_does_not_spill(stages, spills, monkeypatch):
    """On sm_90 the counter has no register left for a third stage."""
    given = [empty(n, 4096, dtype=BF16).detach() for n in (512, 4096)]
    if stages == 3:
        tile = tiles.ProductTile(128, 128, 64, 8, 3)
        monkeypatch.setitem(tiles.TILES, ("many rows", BF16, "sm_90"), tile)
    launch = launch_of("sm_90", isobit.linear, *given)
    assert launch.name == "linear_counter"
    assert launch.call.options.num_stages == stages
    assert bool(measure(launch, "sm_90").spills) == spills


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_tiles_of_targets_are_those_of_16_bits(target):
    """fp32 keeps its own tile on every target."""
    assert tiles.tile_of("many rows", BF16, target) == tiles.MANY_ROWS[target]
    assert tiles.tile_of("many rows", torch.float16, target) == tiles.MANY_ROWS[target]
    assert tiles.tile_of("many rows", torch.float32, target).depth == 16


@pytest.mark.full
@pytest.mark.parametrize("target", [t for t in tiles.MANY_ROWS if t not in ("sm_86", "sm_87")])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_tile_of_many_rows_spills(target, transposed):
    given = [empty(n, 4096, dtype=BF16).detach() for n in (512, 4096)]
    function = torch.ops.isobit.triton_linear_input_grad if transposed else isobit.linear
    prepare("linear", BF16)
    launch = launch_of(target, function, *given)
    found = measure(launch, target)
    assert launch.name == "linear_counter"
    assert launch.constants["PAIRS"] == tiles.MANY_ROWS[target].pairs
    assert found.spills == 0, found


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_a_second_pair_would_be_spilled(target, monkeypatch):
    """So these targets keep one, and the rest in memory."""
    tile = replace(tiles.MANY_ROWS[target], pairs=2)
    monkeypatch.setitem(tiles.TILES, ("many rows", BF16, target), tile)
    prepare("linear", BF16)
    given = [empty(n, 4096, dtype=BF16).detach() for n in (512, 4096)]
    launch = launch_of(target, torch.ops.isobit.triton_linear_input_grad, *given)
    assert measure(launch, target).spills > 0


def loops_of(launch):
    """Return the instructions of each innermost loop of a launch's PTX for sm_90."""
    lines = compiler_for("sm_90").compile(launch.kernel, launch.call).ptx.splitlines()
    labels = {
        line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")
    }
    branches = ((at, re.search(r"\bbra\S*\s+(\$L\w+);", line)) for at, line in enumerate(lines))
    return [
        lines[labels[to[1]] : at]
        for at, to in branches
        if to and to[1] in labels and labels[to[1]] < at
    ]


def barriers(change=nullcontext):
    """Return the barriers of each loop of rms_norm."""
    given = torch.empty(4, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    with change():
        launch = launch_of("sm_90", isobit.rms_norm, *given)
    return [sum("bar.sync" in line for line in loop) for loop in loops_of(launch)]


def test_norms_have_no_barrier_in_a_loop():
    """Weights that are loaded as a tile of one row are moved to the layout of the others, behind barriers."""
    one_row = (
        ("tl.broadcast_to(weight + first, (ROWS, SEGMENTS * 16))", "weight + first"),
        ("tl.load(weight + at, mask=inside", "tl.load(weight + at, mask=at + lane < LENGTH"),
    )
    assert max(barriers()) == 0
    assert max(barriers(source("isobit.ops.rms_norm.triton", *one_row))) == 2


@pytest.mark.usefixtures("_nothing_is_filled")
def test_loads_of_words_do_not_wait_for_each_other():
    """The loop over the sum loads 8 steps; the next block adds what is left of 18,992 words."""
    given = [torch.empty(n, 16, dtype=BF16) for n in (1, 151_936)]
    backend = Recording("sm_90")
    with backends.use(backend):
        isobit.linear_logprob(*given, torch.zeros(1, dtype=torch.int64))
    (launch,) = (one for one in backend.launches if one.name == "sum_segments")
    loads = [sum("ld.global" in line for line in loop) for loop in loops_of(launch)]
    assert loads == [4, 8]  # 4 of 16 bytes for the maximum


@pytest.fixture
def _nothing_is_filled(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
