"""The HTML report: self-contained, escaped, with every section that its profile has."""

import re

from isobit.cli.main import main
from isobit.profiling.api import profile
from isobit.profiling.report import write_profile_page
from tests.profiling.synthetic import one_step
from tests.profiling.test_findings import busy
from tests.profiling.test_ranks import profiled, run_of


def test_the_report_has_findings_ranks_collectives_and_bricks(tmp_path):
    page = write_profile_page(
        profiled(run_of(delays=[(2, step, "loader", 400) for step in range(3)]), tmp_path)
    )
    for words in (
        "What costs time",
        "Where the steps went",
        "Ranks and collectives",
        "Bricks of rank 0",
        "slow-rank",
    ):
        assert words in page
    assert page.count('<div class="rank">') == 3
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%;background", page)]
    assert abs(sum(widths) - 300) < 1  # three ranks whose steps are equally long


def test_names_of_a_trace_are_text(tmp_path, capsys):
    chrome = one_step()
    for event in chrome.events:
        if event["name"] == "aten::mm":
            event["name"] = '<img src=x onerror="a">\x1b[31m'
        if event["name"] == "sgemm":
            event["name"] = "<b>\n\u202ek"
    path = chrome.write(tmp_path / "<i>.json")
    assert main(["profile", str(path), "--html", str(tmp_path / "out.html")]) == 1
    page = (tmp_path / "out.html").read_text()
    assert "<img" not in page
    assert "<i>" not in page
    assert "\x1b" not in page + capsys.readouterr().out
    assert "Where this page comes from" in page


def test_two_runs_have_no_report(tmp_path, capsys):
    for name in ("a.json", "b.json"):
        one_step().write(tmp_path / name)
    words = [
        "profile",
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
        "--html",
        str(tmp_path / "c.html"),
    ]
    assert main(words) == 2
    assert "two runs to compare" in capsys.readouterr().err
    assert not (tmp_path / "c.html").exists()


def roofline_of(chrome, folder):
    page = write_profile_page(profile([chrome.write(folder / "t.json")]))
    return re.search(r'<svg class="roof wide".*?</svg>', page, re.S), page


def test_bricks_are_drawn_below_the_roof_as_far_as_they_are_from_it(tmp_path):
    """A product at 56 % of its bound, one at 14 %, and an operator that only moves data."""
    chrome = busy(steps=1)
    shapes = [[8192, 8192], [8192, 4096]]
    chrome.operator("aten::mm", 1000, 1008, [[8192, 8192], [8192, 4095]], ["c10::BFloat16"] * 2)
    chrome.kernel("sm90_gemm", 1010, 5000, launched=1008)
    chrome.operator("aten::mul", 5000, 5008, shapes[:1] * 2, ["c10::BFloat16"] * 2)
    chrome.kernel("k", 5010, 5400, launched=5008)
    chrome.step(1, 1000, 5400)
    found, page = roofline_of(chrome, tmp_path)
    text = found[0]
    roof = [
        float(y)
        for y in re.search(r'polyline class="line" points="([^"]+)"', text)[1]
        .replace(",", " ")
        .split()
    ][5]
    circles = re.findall(r'<circle class="(\w*)" cx="([\d.]+)" cy="([\d.]+)"', text)
    kinds = {kind for kind, _, _ in circles}
    assert len(circles) == 3
    assert kinds == {"", "slow"}
    assert all(float(y) > roof for _, _, y in circles)  # downwards in SVG
    assert page.count('<svg class="roof') == 2  # for wide and for narrow pages
    assert "prefers-color-scheme:dark" in page
    assert "14% of the bound by bf16 products" in page


def test_nothing_is_drawn_without_rates_or_bounds(tmp_path):
    assert roofline_of(busy(device={"name": "a GPU of tomorrow"}), tmp_path)[0] is None
    without_shapes = busy()
    for event in without_shapes.events:
        event["args"].pop("Input Dims", None)
    assert roofline_of(without_shapes, tmp_path)[0] is None


def test_one_half_is_drawn_alone(tmp_path):
    found, _ = roofline_of(busy(), tmp_path)
    assert "only move data" not in found[0]
    assert "TFLOP/s" in found[0]
