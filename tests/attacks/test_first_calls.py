"""The first call of a process decides nothing: not its threads, not the torch modes and settings it is made under."""

import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad

from isobit.foundation import machine
from isobit.ops import dispatch
from tests.attacks.operators import digests, force_portable

needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")

# Every operator's first call, from eight threads at once that are switched often.
RACE = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import torch, isobit
from tests.attacks.operators import FEATURES, ROWS, calls, draw
torch.set_num_threads(1)
sys.setswitchinterval(1e-5)
lost = []
for name, call in calls().items():
    together = threading.Barrier(8)
    def work():
        x = draw(ROWS, FEATURES).requires_grad_()
        together.wait()
        try:
            call(x).sum().backward()
            found = "no gradient" if x.grad is None else ""
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            lost.append((name, found))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not lost, lost
print("complete")
"""


def test_first_calls_from_many_threads_have_gradients():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.stdout == "complete\n", done.stderr[-2000:]


@pytest.fixture
def unattested():
    """Attestation is forgotten, before and after."""
    dispatch.attestations.cache_clear()
    dispatch.has_native.cache_clear()
    yield
    dispatch.attestations.cache_clear()
    dispatch.has_native.cache_clear()
    assert dispatch.has_native()


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def flushed_subnormals():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def disabled_onednn():
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags does
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def strict_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@needs_native
def test_kernels_attest_under_all_modes_of_the_first_call_at_once(unattested):
    state = torch.get_rng_state()
    with ExitStack() as modes:
        modes.enter_context(flushed_subnormals())
        modes.enter_context(default_dtype(torch.bfloat16))
        modes.enter_context(torch.device("meta"))
        modes.enter_context(torch.inference_mode())
        modes.enter_context(torch.autocast("cpu", torch.bfloat16))
        modes.enter_context(FakeTensorMode())
        modes.enter_context(strict_warnings())
        modes.enter_context(disabled_onednn())
        assert dispatch.has_native()
        assert not torch._C._get_mkldnn_enabled()
        assert machine.flushes_subnormals()
    assert torch.equal(torch.get_rng_state(), state)


@needs_native
def test_kernels_attest_inside_a_transform(unattested):
    seen = []

    def ask(x):
        seen.append(dispatch.has_native())
        return x

    with default_dtype(torch.float64):
        grad(ask)(torch.tensor(1.0))
    assert seen == [True]


@pytest.mark.parametrize("executor", ["native or portable", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_defaults(dtype, executor, monkeypatch):
    if executor == "portable":
        force_portable(monkeypatch)
    expected = digests(dtype)
    for other in (torch.float64, torch.bfloat16):
        with default_dtype(other):
            assert digests(dtype) == expected, other
    with torch.device("meta"):
        assert digests(dtype) == expected


def test_a_module_that_another_thread_imports_is_waited_for(tmp_path, monkeypatch):
    package = tmp_path / "slowly"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from isobit.foundation.lazy import attach\n"
        "__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from slowly.home import operator as operator\n")
    (package / "home.py").write_text(
        "import threading\n"
        "def operator():\n    return registered\n"
        "registered = False\n"
        "threading.Event().wait(0.3)\n"  # the name is there, and its gradient is not
        "registered = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    slowly = import_module("slowly")
    first = threading.Thread(target=lambda: slowly.operator)
    first.start()
    while not hasattr(sys.modules.get("slowly.home"), "registered"):
        time.sleep(0.001)
    assert slowly.operator()
    first.join()
