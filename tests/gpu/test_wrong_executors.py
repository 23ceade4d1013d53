"""What the comparison of executors sees: a wrong executor of each kind differs in bits, and so it is found.

Other segments, other lanes, fused products, a leaf of another length, samples that are folded instead of merged, and
a rounding in between.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import isobit
import isobit.certifying
from isobit.certifying.running.backends import MachineBackend
from isobit.foundation import backends
from isobit.ops.attesting import wide_values
from isobit.ops.gpu import executors, ordered_rows
from tests.gpu.operator_calls import Call, differences

ROWS = wide_values((24, 1024), torch.float32, torch.Generator().manual_seed(3))
TOKENS = wide_values((540, 5), torch.float32, torch.Generator().manual_seed(4))
WEIGHTS = torch.linspace(0.5, 1.5, 1024)
SAMPLES = isobit.Samples.packed([270, 90, 90, 90])
NORM = Call(isobit.rms_norm, (ROWS, WEIGHTS))
NORM_OF_TOKENS = Call(
    lambda x, w: isobit.rms_norm(x, w, samples=SAMPLES), (TOKENS, WEIGHTS[:5].contiguous())
)
NEAR = ROWS / 16  # so that many terms of a softmax count
SOFTMAX = Call(isobit.softmax, (NEAR,))


def changed(name, tmp_path, old, new):
    """Return the module of an operator's executor with its source changed; its kernels are new ones."""
    path = Path(isobit.__path__[0]) / "ops" / name / "triton.py"
    source = path.read_text().replace(f'@triton_operator("{name}', f'@plain("{name}')
    assert old in source
    text = source.replace(old, new)
    text = text.replace(
        "import torch\n", "import torch\nplain = lambda name: lambda function: function\n", 1
    )
    (tmp_path / f"wrong_{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(f"wrong_{name}", tmp_path / f"wrong_{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch reads the annotations of its functions
    spec.loader.exec_module(module)
    return module


def forward(module, name, *given):
    with isobit.certifying.executing("interpreter"):
        return getattr(module, f"triton_{name}")(*given)


def test_the_calls_are_right_without_a_plant():
    assert differences([NORM, NORM_OF_TOKENS, SOFTMAX], "interpreter", "sm_90") == []


def test_other_segments_are_found(monkeypatch):
    executors.prepare("rms_norm", torch.float32)
    executors.prepare("softmax", torch.float32)
    for name in ("rms_norm", "softmax"):
        module = sys.modules[f"isobit.ops.{name}.triton"]
        right = module.row_launch

        def wrong(operator, x, right=right):
            rows, grid, how = right(operator, x)
            return rows, grid, {**how, "SEGMENTS": how["SEGMENTS"] // 2}

        monkeypatch.setattr(module, "row_launch", wrong)
    assert (0, 1) in differences([NORM], "interpreter", "sm_90")
    assert (0, 0) in differences([SOFTMAX], "interpreter", "sm_90")


def test_other_lanes_are_found(tmp_path):
    right = forward(changed("softmax", tmp_path, "16", "16"), "softmax", NEAR)
    wrong = forward(changed("softmax", tmp_path, "16", "8"), "softmax", NEAR)
    assert isobit.bits.equal(right, isobit.softmax(NEAR))
    assert not isobit.bits.equal(wrong, isobit.softmax(NEAR))
    assert torch.allclose(wrong, isobit.softmax(NEAR))


def test_a_rounding_in_between_is_found(tmp_path):
    x, weight = ROWS.bfloat16(), WEIGHTS.bfloat16()
    old, new = "(value * scale) * factor", "(value * scale).to(tl.bfloat16).to(tl.float32) * factor"
    module = changed("rms_norm", tmp_path, old, new)
    wrong, _ = forward(module, "rms_norm", x, weight, 1e-6, None, False)
    assert not isobit.bits.equal(wrong, isobit.rms_norm(x, weight))


class Fusing(MachineBackend):
    """The machine, with kernels whose products the compiler may fuse with sums."""

    def launch(self, kernel, grid, args, constants, options):
        super().launch(kernel, grid, args, constants, {**options, "enable_fp_fusion": True})


def test_fused_products_are_found():
    expected = NORM.results()
    for backend, equal in ((MachineBackend("sm_80"), True), (Fusing("sm_80"), False)):
        with backends.use(backend):
            found = NORM.results()
        assert all(map(isobit.bits.equal, found, expected)) is equal


def test_leaves_of_another_length_are_found(monkeypatch):
    def wrong(cls, samples, device, apart=False):
        runs = samples.segments
        joined = [(run[0].start, sum(leaf.length for leaf in run)) for run in runs]
        return cls(torch.tensor(joined), torch.arange(len(runs) + 1))

    monkeypatch.setattr(ordered_rows.Leaves, "of", classmethod(wrong))
    assert differences([NORM_OF_TOKENS], "interpreter", "sm_90") == [(0, 2)]


def test_samples_that_are_not_merged_by_the_tree_are_found(monkeypatch):
    def fold_all(sums, leaves, dtype):
        bounds = torch.tensor([0, len(sums)])
        return ordered_rows.fold(sums, bounds, dtype)[0]

    monkeypatch.setattr(ordered_rows, "sum_leaves", fold_all)
    assert differences([NORM_OF_TOKENS], "interpreter", "sm_90") == [(0, 2)]
