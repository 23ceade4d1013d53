"""Each finding has a trace that must raise it, and a right twin that must not; and the answers of public traces."""

from dataclasses import replace

import pytest

from isobit.cli.main import main
from isobit.profiling.api import profile
from isobit.profiling.findings import of_collectives
from tests.profiling.planted_delays import LOADER
from tests.profiling.synthetic import CORPUS, Chrome
from tests.profiling.test_ranks import profiled, run_of

H100 = {"name": "NVIDIA H100 80GB HBM3"}


def busy(steps=2, device=H100, dtype="c10::BFloat16"):
    """Steps of 1,000 µs, of which the device computes 990: a product at 70 % of its bound."""
    chrome = Chrome(device=device)
    for step in range(steps):
        at = 1000 * step
        chrome.step(step, at, at + 1000)
        chrome.operator("aten::mm", at, at + 8, [[8192, 8192], [8192, 4096]], [dtype] * 2)
        chrome.kernel("sm90_gemm", at + 10, at + 1000, launched=at + 8)
    return chrome


def idle_between(chrome, add, us=200):
    """Let each step begin with something of the host, and the kernel start that much later."""
    for event in list(chrome.events):
        step, offset = divmod(event["ts"], 1000)
        shift = us * (step + (offset > 0 or event["cat"] == "cpu_op"))
        event["ts"] += shift
        if event["name"].startswith("ProfilerStep"):
            event["dur"] += us
            add(event["ts"], event["ts"] + us)
    return chrome


def rules(chrome, folder, severity="warning"):
    found = profile([chrome.write(folder / "t.json")])
    return [one.rule for one in found.findings if one.severity == severity]


def test_a_busy_device_has_no_finding(tmp_path, capsys):
    assert rules(busy(), tmp_path) == []
    assert main(["profile", str(tmp_path / "t.json")]) == 0
    assert "no finding" in capsys.readouterr().out


HOST = {
    "data-loader": lambda c: lambda a, b: c.note(LOADER, a, b),
    "host-waits": lambda c: lambda a, b: c.call("cudaStreamSynchronize", a, b),
    "allocator": lambda c: lambda a, b: c.call("cudaMalloc", a, b),
    "compiling": lambda c: lambda a, b: c.note("TorchDynamo Compile Time", a, b),
    "host-bound": lambda c: lambda a, b: c.add("python_function", "train.py(9): log", a, b),
}


@pytest.mark.parametrize("rule", HOST)
def test_idle_time_is_named_with_its_cost_and_evidence(rule, tmp_path):
    chrome = busy()
    us = 400 if rule == "host-bound" else 200  # other work of the host has a larger limit
    idle_between(chrome, HOST[rule](chrome), us)
    found = profile([chrome.write(tmp_path / "t.json")])
    first = found.findings[0]
    assert [one.rule for one in found.findings if one.severity == "warning"] == [rule]
    assert first.ns == pytest.approx(2 * us * 1000, abs=20_000)
    assert first.evidence[0].ns == pytest.approx(us * 1000, abs=10_000)
    assert first.share == pytest.approx(us / (1000 + us), abs=0.02)
    assert first.remedy
    assert main(["profile", str(tmp_path / "t.json")]) == 1


@pytest.mark.parametrize("rule", HOST)
def test_the_same_work_behind_a_busy_device_is_no_finding(rule, tmp_path):
    chrome = busy()
    for at in (100, 1100):
        HOST[rule](chrome)(at, at + 400)
    assert rules(chrome, tmp_path) == []


def test_work_that_was_launched_and_does_not_start(tmp_path):
    chrome = busy(steps=1)
    chrome.events = [
        e for e in chrome.events if e["cat"] != "kernel" and e["cat"] != "cuda_runtime"
    ]
    chrome.kernel("late", 500, 1000, launched=10)
    assert rules(chrome, tmp_path) == ["not-started"]


def test_a_slow_product_and_one_that_is_fast_enough(tmp_path):
    shapes = [[8192, 8192], [8192, 4096]]
    chrome = busy(steps=1)
    chrome.step(1, 1000, 5000)
    chrome.operator("aten::mm", 1000, 1008, shapes, ["c10::BFloat16"] * 2)
    chrome.kernel("sm90_gemm", 1010, 5000, launched=1008)
    found = profile([chrome.write(tmp_path / "t.json")])
    assert [one.rule for one in found.findings] == ["low-share-of-bound"]
    assert "22% of its bound by bf16 products" in found.findings[0].detail
    assert found.findings[0].cost == "at most"


def with_kernels(name, dims, types, share, **operator):
    """A busy step in which some of the time goes to another operator."""
    chrome = Chrome(device=H100)
    chrome.step(1, 0, 1000)
    cut = int(990 * (1 - share))
    chrome.operator("aten::mm", 0, 8, [[8192, 8192], [8192, 4096]], ["c10::BFloat16"] * 2)
    chrome.kernel("sm90_gemm", 10, 10 + cut, launched=8)
    chrome.operator(name, 20, 30, dims, types, **operator)
    chrome.kernel("k", 10 + cut, 1000, launched=28)
    return chrome


LARGE = [[4096, 8192], [4096, 8192]]


@pytest.mark.parametrize(
    ("rule", "name", "dims", "types"),
    [
        ("casts", "aten::copy_", LARGE, ["float", "c10::BFloat16"]),
        ("layout-copies", "aten::copy_", LARGE, ["c10::BFloat16"] * 2),
        ("fp32-products", "aten::mm", [[4096, 4096], [4096, 4096]], ["float"] * 2),
    ],
)
def test_operators_that_need_not_run(rule, name, dims, types, tmp_path):
    assert rules(with_kernels(name, dims, types, 0.12), tmp_path) == [rule]
    assert rules(with_kernels(name, dims, types, 0.03), tmp_path) == []


def test_a_model_in_fp32_has_no_finding_about_fp32(tmp_path):
    chrome = with_kernels("aten::mm", [[4096, 4096], [4096, 4096]], ["float"] * 2, 0.12)
    for event in chrome.events:
        if "Input type" in event["args"]:
            event["args"]["Input type"] = ["float", "float"]
    assert rules(chrome, tmp_path) == []


def test_pageable_copies_and_pinned_ones(tmp_path):
    for kind, wanted in (("Pageable", ["pageable-copies"]), ("Pinned", [])):
        chrome = busy(steps=1)
        chrome.copy(f"HtoD ({kind} -> Device)", 20, 120, 5_000_000, stream=9)
        assert rules(chrome, tmp_path) == wanted


def test_a_slow_rank_is_first_and_its_cause_is_said(tmp_path):
    found = profiled(run_of(delays=[(2, step, "loader", 400) for step in range(3)]), tmp_path)
    first = found.findings[0]
    assert (first.rule, first.rank, first.evidence[0].rank) == ("slow-rank", 2, 2)
    assert "idle: data loader 1.200" in first.detail
    assert "would save 1.200 ms" in first.detail
    twin = profiled(run_of(), tmp_path)
    assert [one.rule for one in twin.findings if one.rule in ("slow-rank", "data-loader")] == [
        "data-loader"
    ]


def test_a_rank_that_is_late_once_is_not_slow(tmp_path):
    found = profiled(run_of(delays=[(2, 1, "loader", 400)]), tmp_path)
    assert found.waited_for == {2: 800_000}
    assert "slow-rank" not in [one.rule for one in found.findings]


def test_a_wait_of_a_tenth_needs_more_steps_than_three(tmp_path):
    """With three ranks, one of them is the last in three steps by chance in one run of nine."""
    for steps, wanted in ((3, False), (6, True)):
        found = profiled(
            run_of(steps=steps, delays=[(2, step, "loader", 130) for step in range(steps)]),
            tmp_path,
        )
        assert 0.10 < found.waited_for[2] / sum(rank.whole.total for rank in found.ranks) < 0.25
        assert ("slow-rank" in [one.rule for one in found.findings]) is wanted


def test_moving_data_is_a_finding_of_its_own(tmp_path):
    """The run moves 100 µs of 480; without a late rank that is all that it costs."""
    found = profiled(run_of(), tmp_path)
    assert "exposed-communication" in [one.rule for one in found.findings]
    hidden = run_of()
    for chrome in hidden:
        for event in chrome.events:
            if event["name"] == "sgemm":
                event["dur"] += 110  # compute goes on behind the collective
    found = profiled(hidden, tmp_path)
    assert "exposed-communication" not in [one.rule for one in found.findings]


def test_collectives_that_overlap_another_move_data_too(tmp_path):
    """Three of eight overlap no other: the five that do move as much as the fastest of these."""
    found = profiled(run_of(steps=8), tmp_path)
    for apart, is_said in ((8, True), (3, True), (0, False)):
        collectives = [replace(one, apart=at < apart) for at, one in enumerate(found.collectives)]
        said = of_collectives(replace(found, collectives=tuple(collectives)))
        costs = [one.ns for one in said if one.rule == "exposed-communication"]
        assert costs == ([8 * 3 * 100_000] if is_said else [])


def test_one_rank_of_several_has_exposed_communication_that_cannot_be_told(tmp_path):
    found = profiled(run_of(delays=[(2, 1, "loader", 300)])[:1], tmp_path)
    names = [one.rule for one in found.findings]
    assert "communication-unknown" in names
    assert "slow-rank" not in names
    assert "exposed-communication" not in names


def test_a_brick_has_the_order_of_its_kernels(tmp_path, capsys):
    """A short split-K reduction decides the order of a product whose longest kernel is a tile."""
    chrome = busy(steps=1)
    chrome.kernel("void splitKreduce_kernel<32, 16>", 1000, 1010, launched=7)
    chrome.step(1, 1000, 1010)
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    (product,) = (brick for brick in rank.bricks if brick.operator == "aten::mm")
    assert (product.order, product.order_words.partition(":")[0]) == ("shape", "split-K")
    assert main(["profile", str(tmp_path / "t.json")]) == 0
    assert "the order of addition depends on: shape 100.0%" in capsys.readouterr().out


def test_order_dependent_kernels_are_said_and_are_no_failure(tmp_path):
    chrome = busy()
    chrome.kernel("void splitKreduce_kernel<32, 16>", 2000, 2100, launched=1990)
    chrome.step(2, 2000, 2100)
    assert rules(chrome, tmp_path, "info") == ["order-dependent"]
    assert main(["profile", str(tmp_path / "t.json")]) == 0
    assert rules(busy(), tmp_path, "info") == []


corpus = pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")


@corpus
def test_known_answers_of_public_traces():
    def findings(name):
        return profile([CORPUS / name]).findings

    loader = findings("resnet50_V100_workers0.json.gz")[0]
    assert (loader.rule, round(loader.share, 2)) == ("data-loader", 0.33)
    assert "data-loader" not in [one.rule for one in findings("resnet50_V100_workers4.json.gz")]
    host = findings("vllm_gptoss_B200_eager.json.gz")[0]
    assert host.rule == "host-bound"
    assert host.share >= 0.8
    ranks = findings("dlrm_8xV100.tar.gz")
    assert (ranks[0].rule, ranks[0].rank) == ("slow-rank", 7)
    assert "exposed-communication" not in [one.rule for one in ranks]
