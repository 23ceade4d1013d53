"""A chosen backend runs the Triton executors of one thread, and what has none is refused by name.

1. Contexts nest, belong to a thread, and end with an error.
2. A call under a backend, or with a tensor on a GPU, is a launch of the executor "triton", or it is refused.
3. Triton is imported on first use, and its absence has a remedy.
"""

import subprocess
import sys
import threading
from importlib import import_module

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

import isobit
import isobit.certifying
from isobit import ArgumentError, UnsupportedError
from isobit.foundation import backends
from isobit.foundation.launches import Launch, record_launches
from isobit.ops.exact_sum.op import exact_state
from isobit.ops.gpu import executors
from isobit.ops.linear import partial
from isobit.ops.rms_norm.partial import sample_grads
from isobit.order.cut import Cut

X, W = torch.randn(3, 24), torch.randn(24)


class Recording:
    """A backend that runs nothing and keeps what it is given."""

    target, engine = "sm_90", "tc25x16"

    def __init__(self):
        self.launches = []

    def launch(self, kernel, grid, args, constants, options):
        self.launches.append((kernel.__name__, grid, dict(constants), dict(options)))


def test_contexts_nest_and_end():
    assert backends.chosen() is None
    with isobit.certifying.executing("interpreter", target="sm_80") as outer:
        assert backends.chosen() is outer
        assert (outer.target, outer.engine) == ("sm_80", "tc24x8")
        with isobit.certifying.executing("machine") as inner:
            assert backends.chosen() is inner
            assert inner.engine == "tc25x16"
        with pytest.raises(KeyError), isobit.certifying.executing("machine"):
            raise KeyError
        assert backends.chosen() is outer
    assert backends.chosen() is None


def test_another_thread_has_no_backend():
    found = []

    def work():
        with record_launches() as seen:
            isobit.rms_norm(X, W)
        found.append((backends.chosen(), seen[-1].executor))

    with backends.use(Recording()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found[0][0] is None
    assert found[0][1] in ("native", "portable")


def test_a_launch_names_the_executor():
    with record_launches() as seen, isobit.certifying.executing("interpreter"):
        isobit.rms_norm(X, W)
    isobit.rms_norm(X, W)
    assert seen[0] == Launch("rms_norm", "triton", "float32", (3, 24))


def test_kernels_are_never_fused_and_rows_do_not_choose_a_tile():
    seen = []
    for rows in (1, 3, 1000):
        with backends.use(Recording()) as backend:
            isobit.rms_norm(torch.randn(rows, 1024), torch.ones(1024))
        seen += backend.launches
    assert len(seen) == 3
    assert all(options["enable_fp_fusion"] is False for *_, options in seen)
    assert len({repr((name, constants, options)) for name, _, constants, options in seen}) == 1
    assert len({grid for _, grid, *_ in seen}) > 1


def test_an_empty_call_launches_nothing():
    with backends.use(Recording()) as backend:
        y = isobit.silu(torch.empty(0, 5))
    assert y.shape == (0, 5)
    assert backend.launches == []


def test_an_operator_without_an_executor_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(executors._modules, "silu")
    with (
        isobit.certifying.executing("interpreter"),
        pytest.raises(UnsupportedError, match="silu, which"),
    ):
        isobit.silu(X)
    isobit.silu(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: exact_state([X]),
        lambda: sample_grads(
            X[None],
            X[None],
            W,
            torch.ones(1, 3),
            isobit.Samples.packed([1]),
            heads_total=3,
            first_head=0,
        ),
    ],
    ids=["exact_state", "sample_grads"],
)
def test_paths_of_the_cpu_are_refused_under_a_backend(call):
    call()
    with (
        isobit.certifying.executing("interpreter"),
        pytest.raises(UnsupportedError, match="backend"),
    ):
        call()


def test_fp64_is_refused():
    with (
        isobit.certifying.executing("interpreter"),
        pytest.raises(UnsupportedError, match="float64"),
    ):
        isobit.silu(X.double())


def test_backward_outside_of_the_context_is_refused():
    x = X.clone().requires_grad_()
    with isobit.certifying.executing("interpreter"):
        y = isobit.silu(x)
    with pytest.raises(UnsupportedError, match="forward and backward within"):
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize(
    "given", [("gpu", {}), ("machine", {"target": "sm_13"}), ("interpreter", {"check": True})]
)
def test_wrong_choices_are_refused(given):
    kind, options = given
    with pytest.raises(ArgumentError), isobit.certifying.executing(kind, **options):
        pass


def test_the_machine_checks_races_and_data_on_request():
    expected = isobit.softmax(X)
    with isobit.certifying.executing("machine", check=True):
        assert isobit.bits.equal(isobit.softmax(X), expected)


def test_tensors_on_a_gpu_go_to_the_executor_or_are_refused():
    with FakeTensorMode():
        x, w = torch.empty(3, 24, device="cuda"), torch.empty(24, device="cuda")
        with record_launches() as seen:
            y = isobit.rms_norm(x, w)
        assert (seen[0].executor, y.device.type, y.shape) == ("triton", "cuda", (3, 24))
        with pytest.raises(ArgumentError, match="on the CPU, where"):
            partial.output(x, x, Cut(24, 1, 0))
        with pytest.raises(ArgumentError, match="one device"):
            isobit.rms_norm(x, torch.empty(24))


def test_compiled_code_follows_a_backend_that_is_chosen_later():
    function = torch.compile(lambda x: isobit.silu(x) + 1, backend="eager")
    expected = function(X)
    with isobit.certifying.executing("interpreter"):
        assert isobit.bits.equal(function(X), expected)
    with backends.use(Recording()) as backend:
        function(X)
    assert [name for name, *_ in backend.launches] == ["silu"]


WITHOUT_GRADIENT = ("linear_fp32", "adamw", "adamw_", "scaled", "scaled_", "exact_state")


def test_schemas_and_formulas_are_those_of_the_portable_executors():
    for folder in executors.OPERATORS:
        import_module(executors.home_of(folder))
    names = [name for folder in executors.OPERATORS for name in executors.names_of(folder)]
    assert len(names) >= len(executors.OPERATORS)
    for name in names:
        executors.prepare(name, torch.float32)
        assert name in executors._ready
        backward = [op for op in dir(torch.ops.isobit) if op.startswith(f"triton_{name}_")]
        if not backward and name not in WITHOUT_GRADIENT:
            backward = [f"triton_{name}_backward"]
        for op in (f"triton_{name}", *backward):
            ours = str(getattr(torch.ops.isobit, op).default._schema)
            other = op.replace("triton_", "portable_", 1)
            if hasattr(torch.ops.isobit, other):
                portable = str(getattr(torch.ops.isobit, other).default._schema)
                assert ours.replace(op, "") == portable.replace(other, "")


FIRST_USE = """
import sys, torch, isobit
isobit.rms_norm(torch.randn(2, 8), torch.ones(8))
assert "isobit.ops.rms_norm.triton" not in sys.modules, "imported for a call on the CPU"
sys.modules["triton"] = None
from isobit.foundation import backends
class Nothing:
    target, engine = "sm_90", "tc25x16"
with backends.use(Nothing()):
    try:
        isobit.rms_norm(torch.randn(2, 8), torch.ones(8))
    except isobit.EngineError as error:
        print(error.remedy)
"""


def test_triton_is_imported_on_first_use_and_its_absence_has_a_remedy():
    found = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, check=True
    )
    assert "pip install triton" in found.stdout
