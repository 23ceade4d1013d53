"""The HTML report: self-contained, escaped, with every section that its profile has."""

import re

from isobit.cli.main import main
from isobit.profiling.report import write_profile_page
from tests.profiling.synthetic import one_step
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
