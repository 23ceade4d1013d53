"""The rank-layout gate (`isobit gate training`) passes, detects a wrong merge, and resumes at other layouts.

The workload is the smallest that two tensor-parallel ranks can split. Layouts run in the simulator;
one of them also runs as real processes, with the same digest.
"""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest
import torch

from isobit.cli.gate.training import read_layout
from isobit.cli.main import main
from isobit.errors import ArgumentError, CutError, SimulationError, UnsupportedError
from isobit.gates.training import launcher, rank_layout_gate
from isobit.gates.training import picture as curve_picture
from isobit.gates.training.launcher import Job, run_job
from isobit.gates.training.rank_layout_gate import judge, run_jobs
from isobit.gates.training.train_stock import StockRun
from isobit.gates.training.workload import WORKLOADS, RankLayout, check_layout, layout_grid
from isobit.order.tree import Counter
from isobit.parallel import checkpoint
from isobit.parallel.data import reducer

LAYOUTS = ("1x1x1", "2x2x1", "fsdp2:2x1x1")
SVG = "{http://www.w3.org/2000/svg}"


def curve(*words):
    return main(["gate", "training", "--workload", "tiny", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("curve")


@pytest.fixture(scope="module")
def first(folder):
    """The exit code of a run with stock beside it, whose outcomes are kept."""
    return curve(
        "--layouts",
        *LAYOUTS,
        "--stock",
        "--keep",
        folder / "kept",
        "--picture",
        folder / "curve.svg",
    )


@pytest.fixture(scope="module")
def uninterrupted(first, folder):
    return rank_layout_gate.read_outcomes(folder / "kept")[
        RankLayout(), "tiny", "float32", False, "simulator"
    ].curve


@pytest.fixture
def trained(monkeypatch):
    """The jobs that are trained, from here on."""
    found = []

    def run(job, *rest):
        found.append(job)
        return run_job(job, *rest)

    monkeypatch.setattr(rank_layout_gate, "run_job", run)
    return found


def test_what_is_kept_is_not_trained_again(first, folder, trained, capsys):
    assert first == 0
    assert curve("--layouts", *LAYOUTS, "--stock", "--keep", folder / "kept", "--json") == 0
    assert trained == []
    said = json.loads(capsys.readouterr().out)
    ours, theirs = said["verdicts"]
    assert (said["kept"], ours["side"], theirs["side"]) == (True, "isobit", "stock")
    assert (ours["layouts"], ours["steps"], ours["largest_difference"], ours["healthy"]) == (
        3,
        2,
        0.0,
        True,
    )
    assert [ours[kind] for kind in ("curves", "weights", "gradients", "optimizers")] == [1, 1, 1, 1]
    assert theirs["gradients"] > 1
    assert theirs["largest_difference"] > 0
    assert len({o["digest"] for o in said["outcomes"] if not o["stock"]}) == 1
    assert len({o["digest"] for o in said["outcomes"] if o["stock"]}) == 3
    assert said["workload"]["name"] == "tiny"


def test_what_another_version_left_is_trained_again(first, folder, monkeypatch):
    monkeypatch.setattr(rank_layout_gate, "code_digest", lambda: "another")
    assert rank_layout_gate.read_outcomes(folder / "kept") == {}
    monkeypatch.undo()
    assert len(rank_layout_gate.read_outcomes(folder / "kept")) == 6


def test_a_line_that_was_cut_short_is_trained_again(first, folder, trained, capsys):
    kept = (folder / "kept").read_text().splitlines(keepends=True)
    cut = folder / "cut short"
    cut.write_text("".join(kept[:2]) + kept[2][:90])
    assert curve("--layouts", *LAYOUTS[:2], "--keep", cut) == 0
    assert trained == []
    assert cut.read_text() == "".join(kept[:2])
    told = capsys.readouterr().out
    assert "isobit, float32: 2 layouts, 2 steps: 1 loss curve(s)" in told
    assert told.rstrip().endswith("kept")


def test_the_picture(first, folder):
    root = ElementTree.fromstring((folder / "curve.svg").read_text())
    (panel,) = root.findall(f"{SVG}g")
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {
        "isobit",
        "stock PyTorch",
        "exactly 0",
        "float32 — isobit: 3 layouts, stock: 3 layouts",
    } <= set(words)
    dots = {
        kind: panel.findall(f"{SVG}circle[@class='{kind}-fill']") for kind in ("same", "differs")
    }
    assert [len(found) for found in dots.values()] == [3 * 2, 3 * 2]  # a layout's dot a step
    floor = curve_picture.HEIGHT - 18
    assert {float(dot.get("cy")) for dot in dots["same"]} == {floor}
    assert sum(float(dot.get("cy")) < floor for dot in dots["differs"]) >= 2
    for dot in (*dots["same"], *dots["differs"]):
        assert 0 < float(dot.get("cx")) < curve_picture.WIDTH
        assert 0 < float(dot.get("cy")) < curve_picture.HEIGHT
    assert (
        panel.findall(f"{SVG}circle")[-1] in dots["same"]
    )  # not hidden by stock's first layout, at 0 by definition
    assert float(root.get("width")) > 8 * len(words[0])
    x, y = map(float, re.findall(r"[\d.]+", panel.get("transform")))
    assert x + curve_picture.WIDTH < float(root.get("width"))
    assert y + curve_picture.HEIGHT < float(root.get("height"))
    lines = [line for line in panel.findall(f"{SVG}line") if line.find(f"{SVG}title") is not None]
    sizes = ("1×1×1", "2×2×1", "fsdp2 2×1×1")
    assert {line.find(f"{SVG}title").text for line in lines} == {
        f"{side} {layout}" for side in ("stock", "isobit") for layout in sizes
    }
    assert len(lines) == 2 * 3 * (2 - 1)


def test_the_picture_of_a_run_that_blew_up():
    drawn = curve_picture.draw_curves(
        {"float32": {"stock": {"a": [1.0, 2.0], "b": [math.nan, math.inf]}}}, "Losses"
    )
    dots = list(ElementTree.fromstring(drawn).iter(f"{SVG}circle"))
    heights = [float(dot.get("cy")) for dot in dots if dot.find(f"{SVG}title") is not None]
    assert heights == [curve_picture.HEIGHT - 18] * 2 + [8] * 2


def test_a_wrong_merge_is_broken(first, folder, trained, monkeypatch, capsys):
    class Rounded(Counter):
        def push(self, node, value):
            super().push(node, value.bfloat16().float())

    (folder / "alone").write_text((folder / "kept").read_text().splitlines(keepends=True)[0])
    monkeypatch.setattr(reducer, "Counter", Rounded)
    assert curve("--layouts", "1x1x1", "1x2x1", "--keep", folder / "alone") == 1
    assert [job.layout for job in trained] == [RankLayout(1, 2, 1)]
    assert capsys.readouterr().out.rstrip().endswith("BROKEN")


@pytest.mark.parametrize(
    "layout",
    ["16x1x1", "3x1x1", "1x1x4", "1x1x3", "0x1x1", "ddp:2x1x2", "ddp:1x1x1", "gpipe:2x1x1", "2x2"],
)
def test_a_layout_that_cannot_be_cut(layout, trained, capsys):
    assert curve("--layouts", "1x1x1", layout) == 2
    assert trained == []
    assert "remedy" in capsys.readouterr().err


# ---- cut, and gone on with ----------------------------------------------------------------------------------


def test_a_run_goes_on_at_another_layout(uninterrupted, folder):
    saved = str(folder / "step 1")
    before, _ = run_job(Job(RankLayout(2, 2, 2), "tiny", "float32", stop=1, save=saved))
    assert before.losses == uninterrupted.losses[:1]
    assert before.weights != uninterrupted.weights
    for layout in (RankLayout(2, 2, 1, "fsdp2"), RankLayout(4, 1, 1)):
        after, _ = run_job(Job(layout, "tiny", "float32", load=saved))
        assert (*before.losses, *after.losses) == uninterrupted.losses
        for kind in ("weights", "gradients", "optimizer"):
            assert getattr(after, kind) == getattr(uninterrupted, kind)


def test_killed_while_saving(monkeypatch, folder):
    write = checkpoint.write_folder

    def killed(*given, **options):
        write(*given, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_folder", killed)
    target = folder / "never"
    with pytest.raises(SimulationError):
        run_job(Job(RankLayout(2, 1, 1), "tiny", "float32", stop=1, save=str(target)))
    assert not target.exists()
    assert target.with_name("never.partial").exists()
    with pytest.raises(ArgumentError, match="never finished"):
        run_job(Job(RankLayout(), "tiny", "float32", load=str(target)))
    monkeypatch.undo()
    run_job(Job(RankLayout(), "tiny", "float32", stop=1, save=str(target)))
    assert target.exists()


def test_the_control_has_no_checkpoints(folder):
    with pytest.raises(UnsupportedError, match="checkpoint"):
        launcher.run_rank(RankLayout(), "tiny", "float32", stock=True, save=str(folder / "stock"))


# ---- transports ------------------------------------------------------------------------------------------------


def test_processes_have_the_simulators_digest(uninterrupted):
    found, _ = run_job(Job(RankLayout(2, 2, 1, "ddp"), "tiny", "float32", transport="gloo"))
    assert found == uninterrupted


@pytest.mark.parametrize(("code", "printed"), [(1, "{}"), (0, ""), (0, "{}\n{}")])
def test_a_launch_that_fails_says_why(code, printed, monkeypatch):
    done = CompletedProcess([], code, printed, "out of memory")
    monkeypatch.setattr(launcher.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(
        UnsupportedError,
        match=f"(?s)exit code {code}: out of memory.*-m isobit.gates.training --data=2",
    ):
        launcher.under_torchrun(Job(RankLayout(2), "tiny", "float32", transport="gloo"))


# ---- the grid and the verdict ------------------------------------------------------------------------------------


def test_the_grid():
    found = layout_grid(WORKLOADS["whole"])
    assert layout_grid(WORKLOADS["small"]) == found  # the default has the whole grid
    assert len(found) == len(set(found)) == 39 + 8
    assert sum(layout.engine == "isobit" for layout in found) == 39
    assert RankLayout(8, 2, 4) in found
    assert RankLayout(8, 4, 1) not in found  # 16 samples
    for name, workload in WORKLOADS.items():
        for layout in layout_grid(workload):
            check_layout(layout, workload)
        assert layout_grid(workload)[0] == RankLayout(), name


def test_verdicts(first, folder):
    kept = [o for o in rank_layout_gate.read_outcomes(folder / "kept").values() if not o.stock]
    assert judge(kept).kept
    assert not judge([]).kept
    assert not judge(kept[:1]).kept
    assert not judge(kept[:1] * 3).kept
    for change in (
        {"finite": False},
        {"changed": False},
        {"weights": "other"},
        {"gradients": "other"},
        {"optimizer": "other"},
        {"norms": (1.0, 2.0)},
        {"losses": (0.0, 0.0)},
    ):
        assert not judge([kept[0], replace(kept[1], curve=replace(kept[1].curve, **change))]).kept
    zeros = [
        replace(o, curve=replace(o.curve, losses=(zero, 1.0)))
        for o, zero in zip(kept, (0.0, -0.0), strict=False)
    ]
    assert judge(zeros).curves == 2
    assert not judge([replace(o, curve=replace(o.curve, losses=(), norms=())) for o in kept]).kept


def test_layouts_as_tasks_are_those_of_one_process(first, folder, tmp_path, monkeypatch):
    """The first to end need not be the first that was asked for; a worker with other code is refused."""
    jobs = [Job(RankLayout(*sizes), "tiny", "float32") for sizes in ((2, 2, 1), (1, 1, 1))]
    known = rank_layout_gate.read_outcomes(folder / "kept")
    monkeypatch.setattr(rank_layout_gate, "open_engine", lambda *_: ThreadPoolExecutor(1))
    keep, told = tmp_path / "kept", []
    found = run_jobs(jobs, told.append, keep, processes=2)
    assert [o.curve for o in found] == [known[rank_layout_gate.key_of(job)].curve for job in jobs]
    assert sorted(map(str, told)) == sorted(map(str, jobs))
    assert len(rank_layout_gate.read_outcomes(keep)) == 2
    monkeypatch.setattr(rank_layout_gate, "run_with_digest", lambda job: ((None, 0.0), "another"))
    with pytest.raises(UnsupportedError, match="one version of isobit"):
        run_jobs(jobs, on="ray")


def test_jobs_are_told_as_they_end(first, folder):
    told = []
    jobs = [Job(RankLayout(), "tiny", "float32"), Job(RankLayout(2, 2, 1), "tiny", "float32")]
    found = run_jobs(iter(jobs), told.append, folder / "kept")  # any iterable
    assert told == jobs
    assert [o.name for o in found] == ["isobit 1×1×1", "isobit 2×2×1"]


# ---- a mixture of experts over ranks -------------------------------------------------------------------------


def test_a_mixture_over_ranks_of_experts_and_of_context():
    layouts = (RankLayout(), RankLayout(2, 2, 1, experts=2, context=2))
    found = judge(run_jobs([Job(layout, "moe", "bfloat16", stop=1) for layout in layouts]))
    assert (found.layouts, found.steps, found.kept) == (2, 1, True)


@pytest.mark.full
def test_every_layout_of_a_mixture():
    assert (
        main(["gate", "training", "--workload", "moe", "--dtype", "fp32", "bf16", "--stock"]) == 0
    )


def test_layouts_of_experts_and_of_context():
    assert read_layout("4x2x1x2x2") == RankLayout(4, 2, 1, "isobit", 2, 2)
    assert str(read_layout("4x2x1x2x2")) == "isobit 4×2×1 ep2 cp2"
    assert RankLayout(4, 2, 1, experts=2, context=2).ranks == 8
    grid = layout_grid(WORKLOADS["moe"])
    assert sum(layout.experts > 1 for layout in grid) >= 4
    assert sum(layout.context > 1 for layout in grid) >= 4
    with pytest.raises(CutError, match="divides the data-parallel ranks"):
        RankLayout(2, 1, 1, experts=4)
    with pytest.raises(CutError, match="without tensor parallelism"):
        RankLayout(2, 1, 2, experts=2)
    with pytest.raises(CutError, match="at most 1"):
        check_layout(RankLayout(1, 1, 2), WORKLOADS["moe"])
    with pytest.raises(CutError, match="tensor, expert or context"):
        RankLayout(2, 1, 1, "ddp", context=2)
    with pytest.raises(CutError, match="--workload moe"):
        check_layout(RankLayout(2, 1, 1, experts=2), WORKLOADS["tiny"])
    with pytest.raises(UnsupportedError, match="share attention"):
        StockRun(WORKLOADS["moe"], RankLayout(context=2), torch.float32)
    with pytest.raises(ArgumentError, match="three to five"):
        read_layout("4x2")
