"""A chosen backend runs the Triton executors of one thread, and what has none is refused by name.

1. Contexts nest, belong to a thread, and end with an error.
2. A call under a backend, or with a tensor on a GPU, is a launch of the executor "triton", or it is refused.
3. Triton is imported on first use, and its absence has a remedy.
4. Without gradients a call leaves torch's dispatcher out, unless something watches it or an argument is not plain.
"""

import subprocess
import sys
import threading
from importlib import import_module

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


# ---- without the dispatcher ---------------------------------------------------------------------
@pytest.fixture
def dispatched(monkeypatch):
    """Count the calls of an executor that came through torch's dispatcher, and those that did not."""
    found = {True: 0, False: 0}
    real = executors.without_dispatcher

    def watched(name, given):
        function = real(name, given)
        found[function is None] += 1
        return function

    monkeypatch.setattr(executors, "without_dispatcher", watched)
    with isobit.certifying.executing("interpreter", target="sm_90"):
        yield found


MATRIX, HEADS = torch.randn(5, 24), torch.randn(1, 70, 2, 16)
CALLS = {
    "linear": lambda x: isobit.linear(x, MATRIX),
    "rms_norm": lambda x: isobit.rms_norm(x, W),
    "silu": isobit.silu,
    "attention": lambda x: isobit.attention(HEADS * x[0, 0], HEADS, HEADS, is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_call_leaves_the_dispatcher_out(dispatched, name):
    """It has the bits of the call with gradients, which the dispatcher makes, and its result is no tracked view."""
    with torch.no_grad():
        plain = CALLS[name](X)
    assert dispatched == {True: 0, False: 1}
    assert isobit.bits.equal(CALLS[name](X.clone().requires_grad_()).detach(), plain)
    assert not plain._is_view()
    plain += torch.ones(
        (), requires_grad=True
    )  # torch refuses this for a view that was made without gradients


class Watching(TorchDispatchMode):
    """Keep the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    """Do nothing, in the way of every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_and_a_profiler_see_the_operator(dispatched):
    with torch.no_grad(), Watching() as mode:
        CALLS["linear"](X)
    assert "isobit::triton_linear" in mode.names
    with torch.no_grad(), torch.profiler.profile() as profile:
        CALLS["linear"](X)
    assert "isobit::triton_linear" in {event.name for event in profile.events()}
    with torch.no_grad(), WatchingFunctions():
        CALLS["linear"](X)
    assert dispatched == {True: 3, False: 0}


def test_what_the_dispatcher_would_change_goes_through_it(dispatched):
    """A lazy negation, a zero without memory, a subclass, and a number that the schema converts."""
    negated = torch._neg_view(X)
    assert negated.is_neg()
    with torch.no_grad():
        assert isobit.bits.equal(isobit.linear(negated, MATRIX), isobit.linear(-X, MATRIX))
        assert dispatched == {True: 1, False: 1}
        isobit.linear(torch._efficientzerotensor((3, 24)), MATRIX)
        assert dispatched == {True: 2, False: 1}
        whole = isobit.rms_norm(X, W, eps=1)  # an int; the operator takes a float
        assert isobit.bits.equal(whole, isobit.rms_norm(X, W, eps=1.0))
        given = (X, W, 1, None, True, 0)
        assert executors.without_dispatcher("rms_norm", given) is None
        assert executors.without_dispatcher("rms_norm", (X, W, 1.0, *given[3:])) is not None
        assert executors.without_dispatcher("rms_norm", (*given, 0)) is None
        parameter = torch.nn.Parameter(MATRIX)
        assert isobit.bits.equal(isobit.linear(X, parameter), isobit.linear(X, MATRIX))
        with FakeTensorMode() as mode:
            fake = isobit.linear(mode.from_tensor(X), mode.from_tensor(MATRIX))
        assert type(fake).__name__ == "FakeTensor"
        shape = isobit.linear(X.to("meta"), MATRIX.to("meta")).shape
        assert (shape, dispatched[False]) == ((3, 5), 5)


def test_transforms_and_tangents_are_refused_as_before(dispatched):
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="vmap"):
            torch.func.vmap(lambda x: isobit.linear(x, MATRIX))(X)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(X, X)
            with pytest.raises(UnsupportedError, match="forward-mode"):
                isobit.linear(dual, MATRIX)


def test_rows_outside_of_samples_are_zero_and_others_are_not_filled(dispatched):
    """Memory is poisoned in tests: rows that a kernel leaves out would be NaN."""
    padded = isobit.Samples.padded([3, 2], width=4)
    q = torch.randn(2, 4, 1, 16)
    with torch.no_grad():
        y = isobit.attention(q, q, q, is_causal=True, q_samples=padded, k_samples=padded)
        assert not y[0, 3:].any()
        assert not y[1, 2:].any()
        alone = isobit.attention(q[1:, :2], q[1:, :2], q[1:, :2], is_causal=True)
        assert isobit.bits.equal(y[1:, :2], alone)
        whole = isobit.attention(q, q, q, is_causal=True)
    assert whole.isfinite().all()


def test_plans_of_sizes_do_not_mix(dispatched):
    """Signs of a zero scale and sizes with as many rows have results of their own."""
    with torch.no_grad():
        for scale in (0.0, -0.0, 1.0):
            y = isobit.attention(HEADS, HEADS, HEADS, is_causal=True, scale=scale)
            with backends.use(None):
                want = isobit.attention(HEADS, HEADS, HEADS, is_causal=True, scale=scale)
            assert isobit.bits.equal(y, want)
        for size in ((6, 24), (2, 3, 24), (3, 2, 24), (1, 6, 24)):
            x = torch.randn(size)
            y = isobit.linear(x, MATRIX)
            assert (y.shape, y.stride()) == (
                torch.empty(*size[:-1], 5).shape,
                torch.empty(*size[:-1], 5).stride(),
            )
            with backends.use(None):
                assert isobit.bits.equal(y, isobit.linear(x, MATRIX))
