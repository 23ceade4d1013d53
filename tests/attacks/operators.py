"""Every operator with a small input, for tests of what must hold of all of them alike."""

import torch

import isobit
from isobit import bits
from isobit.ops import dispatch
from isobit.order.samples import Samples

ROWS, FEATURES, OUTPUTS = 6, 48, 9
# Said in full, as the tests change the default dtype and device.
CPU = torch.device("cpu")
TARGETS = torch.tensor([0, 3, -100, 8, 1, 1], device=CPU)
IDS = torch.tensor([0, 3, 1, 1, 5, 2], device=CPU)


def draw(*shape, dtype=torch.float32, seed=0):
    """Normal numbers, the same in every setting."""
    generator = torch.Generator(CPU).manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU).to(dtype)


def calls(dtype=torch.float32):
    """name -> function of one tensor [ROWS, FEATURES]; other inputs are constants, and no stock arithmetic is used."""
    weight, bias = draw(OUTPUTS, FEATURES, dtype=dtype, seed=1), draw(OUTPUTS, dtype=dtype, seed=2)
    norm, angles = draw(FEATURES, dtype=dtype, seed=3), draw(ROWS, 16, seed=4)
    rows, other = draw(ROWS, FEATURES, dtype=dtype), draw(OUTPUTS, FEATURES, dtype=dtype, seed=7)
    samples = Samples.packed([2, 4])

    def heads(x):
        return x.reshape(1, ROWS, FEATURES // 16, 16)

    return {
        "linear": lambda x: isobit.linear(x, weight, bias, samples=samples),
        "linear_group": lambda x: isobit.linear_group(x, (weight, other), samples=samples)[1],
        "rms_norm": lambda x: isobit.rms_norm(x, norm, samples=samples),
        "layer_norm": lambda x: isobit.layer_norm(x, norm, norm),
        "softmax": isobit.softmax,
        "log_softmax": isobit.log_softmax,
        "silu": isobit.silu,
        "gelu": isobit.gelu,
        "swiglu": lambda x: isobit.swiglu(x, rows),
        "exact_sum": isobit.exact_sum,
        "embedding": lambda x: isobit.embedding(IDS, x, samples=samples),
        "attention": lambda x: isobit.attention(heads(rows), heads(rows), heads(x)),
        "rotary": lambda x: isobit.rotary(heads(x), angles, angles),
        "linear_logprob": lambda x: isobit.linear_logprob(x, weight, TARGETS, samples=samples),
        "linear_cross_entropy": lambda x: isobit.linear_cross_entropy(x, weight, TARGETS),
        "a parameter's gradient": lambda w: isobit.linear(rows, w, samples=samples),
    }


NAMES = list(calls())


def digests(dtype, given=None):
    """name -> digests of the output and of the gradient of the one tensor, in whichever executor serves."""
    found = {}
    for name, call in calls(dtype).items():
        x = draw(ROWS, FEATURES, dtype=dtype, seed=5) if given is None else given.clone()
        x.requires_grad_()
        y = call(x)
        y.backward(draw(*y.shape, dtype=y.dtype, seed=6))
        found[name] = bits.digest(y.detach()), bits.digest(x.grad)
    return found


def force_portable(monkeypatch):
    """Every later call goes to the portable executor."""
    monkeypatch.setattr(dispatch, "is_native", lambda _: False)
    monkeypatch.setattr(dispatch, "has_native", lambda: False)
