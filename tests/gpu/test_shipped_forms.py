"""Theorem: every 16-bit product that a model runs on a GPU was attested at its tile, in every element of a matrix.

Nothing is run for the first half: launches of a model's layers are compared with those of the attestation.
"""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import isobit
from benchmarks.kernel_launches import Model, Recording, product_operators, record
from isobit import bits
from isobit.foundation import backends
from isobit.ops.attention import tiles as attention_tiles
from isobit.ops.attention import triton as heads
from isobit.ops.gpu import shipped_forms
from isobit.ops.gpu.attestation import attest_operator, compare
from isobit.ops.gpu.executors import OPERATORS
from isobit.ops.linear import tiles as linear_tiles
from isobit.ops.linear import triton as executor
from isobit.order.engines import ENGINE_OF_TARGET

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MODEL = Model("wide", 2048, 4096, 4, 2, 128, 2048)
# What kernels are compiled for besides their form.
SIZES = {"N", "K", "SEGMENTS", "LEVELS", "KEY_HEADS", "GROUP", "HAS_BIAS", "WIDTH", "COUNT", "SIZE"}


def form(launch):
    """Return a kernel, its tile, and the dtypes of its tensors."""
    written = {p.name for p in launch.kernel.params if p.is_constexpr} - SIZES
    tile = [f"{k}={v}" for k, v in launch.constants.items() if k in written]
    types = [kind for kind in launch.call.signature.values() if kind.startswith("*")]
    options = launch.call.options
    return launch.name, *tile, *types, options.num_warps, options.num_stages


def attested(target, dtype, operators, monkeypatch):
    """Return the launches of an attestation in which everything is taken for equal."""
    backend = Recording(target)
    with monkeypatch.context() as patched, backends.use(backend):
        patched.setattr(bits, "equal", lambda left, right: left.shape == right.shape)
        patched.setattr(
            shipped_forms, "exact", lambda s, left, right, _: torch.zeros(len(left), len(right))
        )
        patched.setattr(
            shipped_forms.Products, "__call__", lambda _, left, right: torch.zeros(len(right))
        )
        for operator in operators:
            found = attest_operator(operator, dtype, CPU)
            assert found.kept, found
    return backend.launches


@pytest.mark.parametrize(
    "target",
    [
        "sm_90",
        "gfx942",
        *(pytest.param(t, marks=pytest.mark.full) for t in ("sm_80", "sm_100", "sm_120")),
    ],
)
def test_every_form_of_a_model_is_attested(target, monkeypatch):
    known = {
        form(one) for one in attested(target, BF16, ("linear", "attention", "logprob"), monkeypatch)
    }
    run = {
        form(one)
        for rows in (1, 17, 130)
        for one in record(target, MODEL, rows, BF16, product_operators)
        if one.name
        not in ("fold_runs", "merge_runs")  # sums of rows, which norms are attested with
    }
    assert len(run) >= 20
    assert run <= known, sorted(run - known, key=str)


def tiles_of(target):
    """Return the cells of the page's table for a target."""
    for kind in ("one tile of rows", "few rows", "many rows", "weight gradient"):
        tile = linear_tiles.tile_of(kind, BF16, target)
        yield f"{tile.rows}×{tile.columns}×{tile.depth}"
    for use in ("few queries", "many queries", "gradient"):
        yield str(attention_tiles.tile_of(use, BF16, target, 256).rows)


def test_the_page_has_the_tiles_that_are_shipped():
    """For each target of its columns; the limits of rows are in the names of its lines."""
    page = (Path(__file__).parents[2] / "docs/explanation/gpu-executors.md").read_text()
    lines = page.partition("| form |")[2].splitlines()
    names, table = lines[0], [line.split("|")[2:-1] for line in lines[2:9]]
    found = {
        target: [row[at].strip() for row in table]
        for at, column in enumerate(names.split("|")[:-1])
        for target in column.strip().split(", ")
    }
    assert len(found) == 8
    assert all(found[target] == list(tiles_of(target)) for target in found), found
    assert (f"{executor.MANY_ROWS} rows or more" in page, executor.MANY_ROWS) == (True, 128)
    assert heads.FEW_ROWS == 16


def test_a_form_that_is_left_out_is_seen(monkeypatch):
    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", shipped_forms.PRODUCT_FORMS[:5])
    known = {form(one) for one in attested("sm_90", BF16, ("linear",), monkeypatch)}
    run = {form(one) for one in record("sm_90", MODEL, 130, BF16, product_operators)}
    assert any(one[0] == "linear_counter" and "BLOCK_M=128" in one for one in run - known)


def test_the_number_of_kernels_to_compile(monkeypatch):
    """A process that trains a dense model in bf16 and fp32 compiled 159 before products had their own tiles."""
    others = {"causal_conv", "delta_rule", "distillation", "experts"}
    dense = [one for one in OPERATORS if one not in others]
    assert len(dense) == len(OPERATORS) - len(others)
    kernels = {
        one.key
        for dtype in (BF16, torch.float32)
        for one in attested("sm_90", dtype, dense, monkeypatch)
    }
    assert 100 < len(kernels) < 175  # operators come and go; each adds a few


@pytest.fixture
def spoiled(monkeypatch):
    """Change the last element of what a kernel's launch writes, by the name of the kernel and its argument."""

    def spoil(kernel, argument):
        backend = isobit.certifying.running.backends.InterpreterBackend
        launch = backend.launch

        def wrong(self, function, grid, args, constants, options):
            launch(self, function, grid, args, constants, options)
            if function.__name__ == kernel:
                args[argument].view(-1)[-1] += 1000  # more than the sums that it enters

        monkeypatch.setattr(backend, "launch", wrong)

    return spoil


def differs(operator, dtype=BF16, target="sm_90"):
    with isobit.certifying.executing("interpreter", target=target):
        return compare(operator, dtype, CPU, ENGINE_OF_TARGET[target])[0]


@pytest.mark.parametrize("wrong", [False, True])
def test_one_element_of_a_tile_is_enough(monkeypatch, spoiled, wrong):
    """The last of 130 × 144: not one of the first rows and columns of a tile."""
    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", ((130, 144, 512, "="),))
    monkeypatch.setattr(shipped_forms, "gradient_difference", lambda *_: None)
    if wrong:
        spoiled("linear_tile", 3)
    found = differs("linear")
    assert found == ("the product of 130 rows and 144 columns at extent 512" if wrong else None)


@pytest.mark.parametrize(
    ("kernel", "argument", "name"),
    [("", 0, None), ("weight_grad", 3, "weight"), ("sum_leaf_rows", 2, "bias")],
)
def test_gradients_of_parameters_in_16_bits(monkeypatch, spoiled, kernel, argument, name):
    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", ())
    spoiled(kernel, argument)
    assert differs("linear") == (name and f"the gradient of linear's {name}")


@pytest.mark.parametrize("split", [False, True])
def test_both_forms_of_a_weight_gradient_are_compared(monkeypatch, split):
    """One of a small weight, whose samples are split over programs, and one of a large one."""
    real = executor.sum_weight_grad

    def wrong(*given, enough=None, **named):
        dw = real(*given, enough=enough, **named)
        if (enough is None) == split:
            dw.view(-1)[-1] += 1000
        return dw

    monkeypatch.setattr(shipped_forms, "PRODUCT_FORMS", ())
    monkeypatch.setattr(executor, "sum_weight_grad", wrong)
    assert differs("linear") == "the gradient of linear's weight"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "argument", "name"),
    [
        ("", 0, ""),
        ("attention", 3, "outputs"),
        ("attention", 4, "log-sum-exp"),
        ("differentiate_queries", 6, "dq"),
        ("differentiate_keys", 6, "dk"),
        ("differentiate_keys", 7, "dv"),
    ],
)
def test_attention_in_16_bits(monkeypatch, spoiled, kernel, argument, name):
    monkeypatch.setattr(shipped_forms, "HEADS", (64,))
    monkeypatch.setattr(shipped_forms, "ATTENTION_FORMS", ((70, 70),))
    spoiled(kernel, argument)
    wanted = f"attention's {name} for 70 queries, 70 keys and heads of 64"
    assert differs("attention") == (wanted if name else None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kernel", "argument", "name"),
    [
        ("", 0, ""),
        ("sum_segments", 1, "values"),
        ("choose_words", 3, "values"),
        ("differentiate_logits", 4, "dhidden"),
        ("weight_grad", 3, "dweight"),
    ],
)
def test_log_probabilities_in_16_bits(monkeypatch, spoiled, kernel, argument, name):
    monkeypatch.setattr(shipped_forms, "VOCABULARY", 310)
    spoiled(kernel, argument)
    assert differs("logprob") == (f"linear_logprob's {name}" if name else None)
