"""Bounds: products as torch's own counter counts them, bytes by hand, and no kernel of a public trace below one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from isobit.profiling.api import profile
from isobit.profiling.bounds import Need, least_copy, least_time, machine_of, machines, need_of
from isobit.profiling.trace import read_traces
from tests.profiling.synthetic import CORPUS, Chrome

H100 = machine_of("NVIDIA H100 80GB HBM3")


def need(name, dims, types=None, strides=(), concrete=(), kernel=""):
    return need_of(name, dims, types or ["c10::BFloat16"] * len(dims), strides, concrete, kernel)


@pytest.mark.parametrize("shapes", [((3, 5), (5, 7)), ((64, 128), (128, 32)), ((1, 9), (9, 1))])
def test_products_are_counted_as_torch_counts_them(shapes):
    left, right = (torch.ones(shape) for shape in shapes)
    with FlopCounterMode(display=False) as counter:
        torch.mm(left, right)
    rows, columns = shapes[0][0], shapes[1][1]
    size = 4 * (left.numel() + right.numel() + rows * columns)
    floats = ["float", "float"]
    assert need("aten::mm", list(map(list, shapes)), floats) == Need(
        counter.get_total_flops(), size, "fp32"
    )
    biased = need("aten::addmm", [[columns], *map(list, shapes)], ["float"] * 3)
    assert biased == Need(counter.get_total_flops(), size, "fp32")
    with FlopCounterMode(display=False) as counter:
        torch.bmm(left.expand(6, -1, -1), right.expand(6, -1, -1))
    batched = [[6, *shape] for shape in shapes]
    assert need("aten::bmm", batched, floats).flops == counter.get_total_flops()
    expanded = need("aten::bmm", batched, floats, [[0, 1, 1], [0, 1, 1]])
    assert expanded.bytes == 4 * (left.numel() + right.numel() + 6 * rows * columns)


def test_attention_is_counted_as_torch_counts_it():
    query = [2, 128, 4, 64]  # batch, length, heads, depth
    full = need("aten::_flash_attention_forward", [query] * 3, concrete=["", "", "", "False"])
    as_torch = sdpa_flop_count((2, 4, 128, 64), (2, 4, 128, 64), (2, 4, 128, 64))
    assert full == Need(as_torch, 4 * 2 * 2 * 128 * 4 * 64, "bf16")
    causal = need("aten::_flash_attention_forward", [query] * 3, concrete=["", "", "", "True"])
    assert causal.flops == as_torch * 129 // 256  # pairs on or below the diagonal
    assert (
        need("aten::_flash_attention_forward", [query] * 3).flops == causal.flops
    )  # not recorded: the lower one
    heads_first = [[2, 4, 128, 64]] * 3
    assert (
        need("aten::_scaled_dot_product_flash_attention", heads_first, concrete=["False"]).flops
        == as_torch
    )
    assert (
        need("aten::_flash_attention_forward", [[300, 4, 64]] * 3) is None
    )  # packed: lengths are not recorded


@pytest.mark.parametrize(
    ("name", "dims", "types", "strides", "size"),
    [
        ("aten::mul", [[8, 4], [8, 4]], ["float", "float"], [], 3 * 128),
        ("aten::mul", [[8, 4], [4]], ["float", "float"], [], 128 + 16 + 128),
        ("aten::mul", [[8, 4], [8, 4]], ["float", "float"], [[4, 1], [0, 1]], 128 + 16 + 128),
        (
            "aten::mul",
            [[8, 4], [], [8, 4]],
            ["float", "double", "float"],
            [],
            2 * 128,
        ),  # the third is out=
        ("aten::clamp_min", [[8, 4], [], [8, 4]], ["float", "Int", "float"], [], 2 * 128),
        ("aten::add_", [[8, 4], [8, 4]], ["float", "c10::BFloat16"], [], 128 + 64 + 128),
        ("aten::silu", [[8, 4]], ["c10::BFloat16"], [], 2 * 64),
        ("aten::copy_", [[8, 4], [8, 4]], ["float", "c10::BFloat16"], [], 128 + 64),
        ("aten::copy_", [[8, 4], [8, 4]], ["float", "float"], [[4, 1], [0, 0]], 128 + 4),
        ("aten::fill_", [[8, 4], []], ["float", "Scalar"], [], 128),
        ("aten::mean", [[8, 4], []], ["float", ""], [], 128),
        ("aten::eq", [[8, 4], [8, 4]], ["float", "float"], [], 256 + 32),
        ("aten::embedding", [[1000, 16], [5]], ["float", "long int"], [], 5 * 64 + 5 * 8),
        (
            "aten::index_select",
            [[1000], [], [5]],
            ["float", "Scalar", "long int"],
            [],
            5 * 4 + 5 * 8,
        ),
        (
            "aten::native_layer_norm",
            [[8, 4], [], [4], [4]],
            ["float", "", "float", "float"],
            [],
            2 * 128 + 16,
        ),
    ],
)
def test_bytes_by_hand(name, dims, types, strides, size):
    assert need(name, dims, types, strides) == Need(0, size, "bf16" if "BF" in types[0] else "fp32")


def test_cat_has_the_size_of_an_element_in_its_kernel_s_name():
    dims = [[[2, 3], [2, 5]], []]
    found = need(
        "aten::cat", dims, ["TensorList", "Scalar"], kernel="CatArrayBatchedCopy<OpaqueType<2u>, 4>"
    )
    assert found == Need(0, 2 * 16 * 2, "fp32")
    assert need("aten::cat", dims, ["TensorList", "Scalar"], kernel="cat") is None


@pytest.mark.parametrize(
    ("name", "dims", "types"),
    [
        ("aten::mm", [[3, 5], [6, 7]], None),
        ("aten::mm", [[3], [3]], None),
        ("aten::mm", [], []),
        ("aten::mm", [[3, -5], [-5, 7]], None),
        ("aten::mm", [["a", 5], [5, 7]], None),
        ("aten::mm", [[3, 5], [5, 7]], ["QInt8", "QInt8"]),
        ("aten::mul", [[[1], [2]], []], ["TensorList", ""]),
        ("aten::copy_", [[3]], ["float"]),
        ("aten::cudnn_convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], None),
        ("mine::kernel", [[3, 5]], None),
        ("aten::cat", [None, 3], [None, None]),
    ],
)
def test_no_formula_or_no_shapes_is_no_bound(name, dims, types):
    assert need(name, dims, types, kernel="OpaqueType<2u>") is None


def test_rates_have_sources_and_names_find_them():
    assert all(
        machine.source and machine.memory > 0 and machine.cache > 0 for machine in machines()
    )
    found = {
        "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA A100-SXM4-80GB": "A100 80GB",
        "NVIDIA A100-PG509-200": "A100 40GB", "Tesla V100-DGXS-32GB": "V100 SXM2", "AMD Instinct MI300X VF": "MI300X",
        "AMD Instinct MI250X": "MI250X", "NVIDIA B200": "B200", "NVIDIA H200": "H200",
    }  # fmt: skip
    assert {name: machine_of(name).name for name in found} == found
    assert machine_of("AMD Radeon Graphics") is machine_of("") is None


def test_bounds_in_nanoseconds():
    products = least_time(Need(989_400_000, 1000, "bf16"), H100)
    assert (products.ns, products.by) == (1000, "bf16 products")
    memory = least_time(Need(0, 3_350_000, "bf16"), H100)
    assert (memory.ns, memory.by, memory.strict) == (1000, "memory", 0)  # the cache may hold it
    assert least_time(Need(0, 53_350_000, "bf16"), H100).strict == 1000
    assert least_copy("Memcpy HtoD (Pageable -> Device)", 64_000, H100).ns == 1000
    assert least_copy("Memcpy DtoD (Device -> Device)", 1_675_000, H100).ns == 1000
    assert least_copy("Memset (Device)", 1000, H100) is None


def traced(kernels, device="NVIDIA H100 80GB HBM3"):
    chrome = Chrome(device={"name": device})
    chrome.step(1, 0, 10_000)
    at = 100
    for name, dims, length in kernels:
        chrome.operator(name, at - 50, at, dims, ["c10::BFloat16"] * len(dims))
        chrome.kernel("gemm", at, at + length, launched=at - 10)
        at += length + 100
    return chrome


def test_bricks_are_operators_at_shapes_with_a_share_of_the_bound(tmp_path):
    square = [[4096, 4096], [4096, 4096]]
    chrome = traced(
        [("aten::mm", square, 200), ("aten::mm", square, 240), ("mine::op", [[3, 3]], 100)]
    )
    chrome.copy("HtoD (Pageable -> Device)", 9000, 9050, 64_000)
    chrome.kernel(
        "ncclDevKernel_AllReduce_Sum_f32",
        9100,
        9200,
        **{"Collective name": "allreduce", "In msg nelems": 5, "dtype": "Float"},
    )
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    first, *rest = rank.bricks
    assert (first.kind, first.operator, first.shapes) == (
        "kernel",
        "aten::mm",
        "[4096,4096] × [4096,4096]",
    )
    assert (first.calls, first.slices, first.ns, first.bound_by) == (2, 2, 440_000, "bf16 products")
    assert first.of_bound == pytest.approx(2 * 2 * 4096**3 / 989.4e12 / 440e-6, abs=1e-5)
    assert {(b.kind, b.operator, b.of_bound) for b in rest} == {
        ("kernel", "mine::op", None),
        ("transfer", "HtoD (Pageable -> Device)", 0.02),
        ("collective", "allreduce", None),
    }  # fmt: skip
    assert rank.device_time == sum(b.ns for b in rank.bricks) == 690_000
    assert rank.bounded_time == 490_000


def test_a_kernel_below_its_memory_bound_had_its_data_in_the_cache(tmp_path):
    chrome = traced([("aten::mul", [[1024, 1024], [1024, 1024]], 1)])
    (brick,) = profile([chrome.write(tmp_path / "t.json")]).ranks[0].bricks
    assert (brick.of_bound, brick.bound_by, brick.strict) == (None, "cache", 0)


def test_an_unknown_device_has_no_bounds(tmp_path):
    chrome = traced([("aten::mm", [[64, 64], [64, 64]], 200)], device="Some GPU")
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    assert rank.peaks == ""
    assert rank.bounded_time == 0


def test_blocks_are_the_repeated_modules_forward_and_backward(tmp_path):
    chrome = Chrome()
    chrome.step(1, 0, 1000)
    chrome.add("python_function", "nn.Module: Model_0", 0, 300)
    for i, length in enumerate((10, 20, 70)):
        at = 100 * i
        chrome.add("python_function", f"nn.Module: Layer_{i}", at, at + 90)
        chrome.operator("aten::mm", at + 5, at + 30, [[8, 8], [8, 8]], **{"Sequence number": i})
        chrome.kernel("k", at + 20, at + 20 + length, launched=at + 19)
    for i, length in enumerate((20, 40, 60)):
        at = 900 - 150 * i
        name = "autograd::engine::evaluate_function: MmBackward0"
        chrome.operator(name, at, at + 90, tid=2, **{"Sequence number": i})
        chrome.kernel("k", at + 20, at + 20 + length, launched=at + 19)["args"]["stream"] = 7
        chrome.events[-2]["tid"] = 2
    (rank,) = profile([chrome.write(tmp_path / "t.json")]).ranks
    found = [(block.name, block.forward, block.backward) for block in rank.blocks]
    assert found == [
        ("Layer_0", 10_000, 20_000),
        ("Layer_1", 20_000, 40_000),
        ("Layer_2", 70_000, 60_000),
    ]


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_public_traces_have_bounds_for_most_of_the_time_and_none_is_passed():
    for name, known in (("qwen0.5b_H100", 0.85), ("qwen0.5b_MI300X", 0.85), ("vit_H100", 0.85)):
        (rank,) = profile([CORPUS / f"{name}.json.gz"]).ranks
        assert rank.bounded_time / rank.device_time >= known
        assert [b for b in rank.bricks if b.strict > b.ns or (b.of_bound or 0) > 1] == []
        assert (
            sum(block.name.startswith(("Qwen2DecoderLayer_", "ViTLayer_")) for block in rank.blocks)
            >= 12
        )


@pytest.mark.full
@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_no_brick_of_any_public_trace_is_above_its_bound():
    for file in sorted(CORPUS.glob("*.gz")):
        for rank in profile([file]).ranks:
            assert [b for b in rank.bricks if b.strict > b.ns or (b.of_bound or 0) > 1] == [], (
                rank.name
            )


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_bricks_are_all_of_the_device_time():
    (trace,) = read_traces([CORPUS / "vit_H100.json.gz"])
    (rank,) = profile([CORPUS / "vit_H100.json.gz"]).ranks
    assert rank.device_time == sum(event.duration for event in trace.device)


# TraceLens' own reference for this trace (tests/traces/compare_test_e2e/reference/mi300_perf_report_csvs/GEMM.csv at
# 87031cd): shapes, mean TFLOP/s, µs of all kernels.
TRACELENS = [
    ("aten::mm", "[8944,1024] × [1024,2816]", 466.8243, 5308.273),
    ("aten::addmm", "[1024] × [8944,1024] × [1024,1024]", 457.6051, 2954.763),
    ("aten::mm", "[8944,2816] × [2816,1024]", 521.8667, 2374.795),
    ("aten::mm", "[8944,1024] × [1024,1024]", 459.5800, 980.549),
]


@pytest.mark.skipif(not CORPUS.exists(), reason="public traces are not there")
def test_products_run_as_fast_as_tracelens_says():
    (rank,) = profile([CORPUS / "qwen0.5b_MI300X.json.gz"]).ranks
    found = {(brick.operator, brick.shapes): brick for brick in rank.bricks}
    for operator, shapes, rate, time in TRACELENS:
        brick = found[operator, shapes]
        assert brick.ns == pytest.approx(time * 1000, abs=1)
        assert brick.of_bound * machine_of(rank.device).bf16 == pytest.approx(rate, rel=0.005)
