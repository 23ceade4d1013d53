"""Kernels that were compiled for another minor version of torch serve, with gradients by formulas in Python.

1. Compiled formulas are registered for the minor version that they were compiled for, and for no other.
2. Without them, all nine operators have the same bits, forward and backward, and the same refusals.
3. The library loads where torch lacks every symbol of autograd that the formulas use.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isobit.foundation import native

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "src" / "isobit" / "_native.so"
STAMP = LIBRARY.with_suffix(".json")


def compiled_for():
    """Return the version of torch that the kernels were compiled for, or skip where there are none."""
    if native.load() is not None:
        pytest.skip("there are no native kernels")
    return json.loads(STAMP.read_text())["torch"]


# Each operator's call; prints a digest of outputs and gradients, and the name of the node.
PROGRAM = """
import json, sys
import torch

if sys.argv[1] == "other":
    torch.__version__ = "1.99.0"
import isobit
from blake3 import blake3
from isobit.foundation import native

def draw(*sizes):
    return (torch.randn(*sizes) * torch.randn(*sizes).exp()).requires_grad_()

torch.manual_seed(0)
ids = torch.randint(0, 11, (2, 7))
cos, sin = torch.randn(7, 16), torch.randn(7, 16)
CALLS = {
    "softmax": lambda x: isobit.softmax(x),
    "log_softmax": lambda x: isobit.log_softmax(x),
    "silu": lambda x: isobit.silu(x),
    "gelu": lambda x: isobit.gelu(x),
    "swiglu": lambda x: isobit.swiglu(x, x * 2),
    "rotary": lambda x: isobit.rotary(x.view(2, 7, 2, 16), cos, sin),
    "embedding": lambda x: isobit.embedding(ids, x[0]),
    "rms_norm": lambda x: isobit.rms_norm(x, x[0, 0]),
    "layer_norm": lambda x: isobit.layer_norm(x, x[0, 0], x[0, 1]),
}
found = {"compiled": native.load() is None}
for name, call in CALLS.items():
    torch.manual_seed(1)
    x = draw(2, 7, 32) if name != "embedding" else draw(1, 11, 32)
    y = call(x)
    y.backward(torch.randn_like(y))
    bits = b"".join(t.detach().contiguous().numpy().tobytes() for t in (y, x.grad))
    found[name] = [blake3(bits).hexdigest()[:16], y.grad_fn.name()]
    try:
        torch.func.grad(lambda x: call(x).sum())(x.detach())
        found[name].append("no error")
    except isobit.UnsupportedError as error:
        found[name].append(str(error).splitlines()[0])
print(json.dumps(found))
"""


def run(which):
    words = [sys.executable, "-c", PROGRAM, which]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_formulas_in_python_have_the_same_bits():
    is_this = compiled_for().split(".")[:2] == torch.__version__.split(".")[:2]
    ours, other = run("this"), run("other")
    assert ours.pop("compiled")
    assert other.pop("compiled")
    assert len(ours) == 9
    for name in ours:
        assert ours[name][0] == other[name][0], name
        assert ours[name][2] == other[name][2] != "no error", name
        assert ("CppNode<isobit::derivatives::" in ours[name][1]) == is_this
        assert "GeneratedBackwardFor_isobit_" in other[name][1]


def test_compiled_formulas_are_for_one_minor_version():
    major, minor = compiled_for().split(".")[:2]
    register = torch.ops.isobit.register_gradients
    if torch.__version__.startswith(f"{major}.{minor}."):  # a call registers them
        assert register(torch.__version__)
        assert register(f"{major}.{minor}.99+cu130")
    for other in (f"{major}.{minor}9.0", f"{major}.{int(minor) + 1}.0", f"1{major}.{minor}.0", ""):
        assert not register(other)


def test_no_symbol_of_autograd_is_required():
    if not LIBRARY.exists():
        pytest.skip("there are no native kernels")
    listed = subprocess.run(["nm", "-D", str(LIBRARY)], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    undefined = [row[-1] for row in rows if row[-2] == "U"]
    weak = [row[-1] for row in rows if row[0] in "wv" and "5torch8autograd" in row[-1]]
    assert len(undefined) > 50
    assert len(weak) > 10
    assert [name for name in undefined if "5torch8autograd" in name or "6dynamo" in name] == []
