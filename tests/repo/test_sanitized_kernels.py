"""The kernels touch no memory outside of their tensors, and do nothing that C++ leaves undefined.

The operators' tests, ten training steps, and frozen weights that another thread writes, on kernels that are built with
AddressSanitizer and UndefinedBehaviorSanitizer. That the tool sees a write behind a part of the scratch memory is shown
by tests/ops/test_scratch_memory.py.
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sanitized")


def run(folder, *words):
    """Run Python on sanitized kernels, which the first call compiles."""
    return subprocess.run(
        [sys.executable, SCRIPT, "address", folder, "--", *words],
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
