"""The kernels touch no memory outside of their tensors, and do nothing that C++ leaves undefined.

The operators' tests, ten training steps, and frozen weights that another thread writes, on kernels that are built with
AddressSanitizer and UndefinedBehaviorSanitizer. That the tool sees a write behind a part of the scratch memory is shown
by tests/ops/test_scratch_memory.py. With ThreadSanitizer: calls that read a frozen weight do not race with a thread
that replaces it; in-place writes next to calls that read the weight itself are the control, which it must report.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "packaging" / "sanitized_kernels.py"
TESTS = ["tests/ops", "tests/attacks/test_frozen_weights.py", "tests/test_optim.py"]
TRAINING = """
import torch, isobit

torch.manual_seed(0)
model = torch.nn.Sequential(
    isobit.nn.Embedding(100, 64), isobit.nn.RMSNorm(64), isobit.nn.SwiGLU(64, 160), isobit.nn.Linear(64, 100)
)
optimizer, losses = isobit.optim.AdamW(model.parameters(), lr=1e-2), []
ids = torch.randint(0, 100, (4, 33))
for _ in range(10):
    hidden = model[:-1](ids[:, :-1])
    q = hidden.unflatten(-1, (4, 16))
    hidden = isobit.attention(q, q, q, is_causal=True).flatten(-2)
    loss = isobit.linear_cross_entropy(hidden, model[-1].weight, ids[:, 1:])
    loss.backward()
    optimizer.clip_and_step(1.0)
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print("ten steps")
"""

# One OpenMP thread: TSan does not see libgomp's barriers, and would report every loop of several.
THREADS = """
import sys, threading
import torch, isobit

how, rounds = sys.argv[1], 20
torch.manual_seed(0)
layer, x, mixed = isobit.nn.Linear(256, 192, bias=False), torch.randn(3, 256), []
weights = [isobit.linear(torch.randn(192, 8), torch.randn(256, 8)) for _ in range(rounds)]
whole = {isobit.bits.digest(isobit.linear(x, w)) for w in (layer.weight.detach(), *weights)}
optimizer = isobit.optim.AdamW(layer.parameters(), lr=1e-3)
layer.weight.grad = torch.randn(192, 256)
frozen = isobit.freeze(layer) if how == "replaced" else None
done = threading.Event()


def read():
    with torch.no_grad():
        while not done.is_set():
            found = isobit.bits.digest(layer(x))
            if how == "replaced" and found not in whole:
                mixed.append(found)


def write():
    for weight in weights:
        if how == "replaced":
            layer.weight.data = weight * 1
        else:
            optimizer.step()
    done.set()


threads = [threading.Thread(target=one) for one in (read, read, write)]
for one in threads:
    one.start()
for one in threads:
    one.join()
with torch.no_grad():
    assert isobit.bits.equal(layer(x), isobit.linear(x, layer.weight.detach().clone()))
assert not mixed, "a mixture of two weights"
print(rounds, "weights")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sanitized")


def run(folder, *words, kind="address"):
    """Run Python on sanitized kernels, which the first call compiles."""
    return subprocess.run(
        [sys.executable, SCRIPT, kind, folder, "--", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.full  # ten minutes: all of csrc is compiled, and its code is several times slower
@pytest.mark.parametrize("threads", [1, 3])
def test_ten_training_steps_touch_nothing_else(folder, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    done = run(folder, "-c", TRAINING)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ten steps" in done.stdout


@pytest.mark.full
def test_the_operators_touch_nothing_else(folder):
    done = run(
        folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not full", *TESTS
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout


@pytest.mark.full
def test_a_frozen_weight_that_is_replaced_is_no_race(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run(folder, "-c", THREADS, "replaced", kind="thread")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "20 weights" in done.stdout
    control = run(folder, "-c", THREADS, "in place", kind="thread")
    assert (control.returncode, "data race" in control.stderr) == (99, True)
