"""Two runs brick by brick: the rows add up to the difference of the steps, and a planted change comes first."""

import json
import random

import pytest

from isobit.cli.main import main
from isobit.profiling.account import tiles
from isobit.profiling.api import compare, profile
from isobit.profiling.records import Comparison, Row
from tests.profiling.synthetic import CORPUS, Chrome

SMALL, LARGE = [[64, 64], [64, 64]], [[4096, 512], [512, 512]]


def run(steps=2, swap=False, copy=False, exposed=False, shorter=0):
    """Steps of 1,000 µs: two products, a collective behind one of them, a copy, idle time."""
    chrome = Chrome()
    for step in range(steps):
        at = 1000 * step
        chrome.step(step, at, at + 1000 - shorter)
        chrome.operator("aten::mm", at, at + 40, SMALL)
        chrome.kernel("sgemm_64", at + 50, at + 150, launched=at + 30)
        chrome.operator("aten::mm", at + 50, at + 90, LARGE)
        chrome.kernel(
            "other_gemm" if swap else "sgemm_128",
            at + 200,
            at + (700 if swap else 500),
            launched=at + 80,
        )
        collective = 750 if exposed else 250
        chrome.kernel(
            "ncclDevKernel_AllReduce",
            at + collective,
            at + collective + 200,
            launched=at + 120,
            stream=9,
        )
        if copy:
            chrome.copy("DtoH (Device -> Pageable)", at + 710, at + 860, 4000, launched=at + 700)
    return chrome


def compared(folder, left, right):
    left.write(folder / "a.json")
    right.write(folder / "b.json")
    return compare(folder / "a.json", folder / "b.json")


CHANGES = {
    "swap": ("kernel", "aten::mm", 2 * 200_000),
    "copy": ("transfer", "DtoH (Device -> Pageable)", 2 * 150_000),
    "exposed": ("collective", "ncclDevKernel_AllReduce", 2 * 200_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_planted_change_is_the_first_row_that_is_work(change, tmp_path):
    found = compared(tmp_path, run(), run(**{change: True}))
    kind, operator, ns = CHANGES[change]
    first = next(row for row in found.rows if row.kind != "idle")
    assert (first.kind, first.operator, first.right - first.left) == (kind, operator, ns)
    assert sum(row.right - row.left for row in found.rows) == found.totals[1] - found.totals[0] == 0
    if change == "swap":
        assert (first.left_kernels, first.right_kernels) == (("sgemm_128",), ("other_gemm",))


def test_other_kernels_of_products_are_said(tmp_path):
    found = compared(tmp_path, run(), run(swap=True))
    assert [
        note
        for note in found.notes
        if note.startswith("1 of 2 kernels of matrix products in A are not in B")
    ]
    assert compared(tmp_path, run(), run(copy=True)).notes == ()


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_decode_and_prefill_of_a_server_use_other_kernels_for_every_projection():
    """Qwen3-8B on SGLang: the same weights, and no kernel of a product in common."""
    names = ("decode", "prefill")
    found = compare(*(CORPUS / f"sglang_qwen3-8b_MI300X_{name}.json.gz" for name in names))
    note, tiles = found.notes
    assert note.startswith("5 of 5 kernels of matrix products in A are not in B, which has 4")
    assert "16x32x512" in tiles
    assert "128x256x32" in tiles
    assert "0 in both" in tiles


def test_equal_runs_differ_in_nothing(tmp_path):
    assert {row.right - row.left for row in compared(tmp_path, run(), run()).rows} == {0}


def test_other_numbers_of_steps_are_compared_per_step(tmp_path):
    found = compared(tmp_path, run(steps=2), run(steps=5))
    assert {row.right * 2 - row.left * 5 for row in found.rows} == {0}
    assert found.totals[1] * 2 == found.totals[0] * 5


def test_rows_that_do_not_add_up_cannot_be_made():
    row = Row("kernel", "mm", "", "", 4, 1, (), 5, 1, ())
    with pytest.raises(ArithmeticError):
        Comparison(("a", "b"), ("", ""), ("", ""), (1, 1), (4, 6), (row,))


def test_tiles_are_disjoint_and_the_last_to_start_has_them():
    draw = random.Random(0)
    for _ in range(300):
        slices = []
        for number in range(draw.randint(0, 6)):
            start = draw.randint(0, 30)
            slices.append((start, start + draw.randint(0, 12), number))
        owner = {}
        for start, end, number in tiles(slices):
            for at in range(start, end):
                assert at not in owner
                owner[at] = number
        for at in range(45):
            running = [(start, -end, number) for start, end, number in slices if start <= at < end]
            assert owner.get(at) == (max(running)[2] if running else None)


def test_the_command_compares_two_runs_and_profiles_two_ranks(tmp_path, capsys):
    run().write(tmp_path / "a.json")
    run(swap=True).write(tmp_path / "b.json")
    both = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["profile", *both]) == 0
    out = capsys.readouterr().out
    assert "B - A: +0.000 ms per step" in out
    assert (
        "+0.200 ms kernel aten::mm [4096,512] × [512,512] float: 0.300 to 0.500, sgemm_128 is now other_gemm"
        in out
    )
    main(["profile", *both, "--json"])
    assert json.loads(capsys.readouterr().out)["comparison"]["totals"] == [2_000_000, 2_000_000]
    assert main(["profile", both[0], "--compare"]) == 2
    assert "expected two traces" in capsys.readouterr().err


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_time_of_public_traces_is_all_in_bricks_and_idle_time():
    for name in (
        "vit_H100.json.gz",
        "qwen0.5b_H100.json.gz",
        "dlrm_8xV100.tar.gz",
        "minitoy_MI250.json.gz",
    ):
        for rank in profile([CORPUS / name]).ranks:
            assert sum(brick.wall for brick in rank.bricks) + rank.whole.idle == rank.whole.total
    pair = compare(CORPUS / "qwen0.5b_H100.json.gz", CORPUS / "qwen0.5b_MI300X.json.gz")
    assert sum(row.right - row.left for row in pair.rows) == pair.totals[1] - pair.totals[0]
