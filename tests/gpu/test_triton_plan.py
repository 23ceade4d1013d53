"""Compiled executors compute the plan's expressions: equal names, so equal bits for all inputs of these sizes."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import isobit
from isobit.certifying.names import names
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.foundation import backends
from isobit.ops.gpu import executors
from tests.certifying.plan import gradients
from tests.certifying.plan.domain import Names
from tests.certifying.plan.operators import Arithmetic
from tests.certifying.running import Launch, Session, draw
from tests.gpu.operator_calls import TARGETS

SAMPLES = isobit.Samples.packed([258, 0, 1, 7])
SPANS = torch.tensor(SAMPLES.spans)


class Naming(Session):
    """A backend that runs compiled kernels with names; tensors stay alive, so that an address is one tensor."""

    def __init__(self, target):
        super().__init__(target)
        self.alive = []

    def launch(self, kernel, grid, args, constants, options):
        self.alive += args
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **constants}
        self.run(Launch(kernel, grid, given, dict(options)))


def inputs(dtype, rows, n, *labels):
    """Tensors by the names of the kernels' parameters: statistics are fp32 [rows], parameters [n], others [rows, n]."""
    shapes = {"means": (rows,), "scales": (rows,), "weight": (n,), "bias": (n,)}
    return {
        label: draw(
            *shapes.get(label, (rows, n)),
            dtype="f32" if label in ("means", "scales") else dtype,
            seed=at,
        )
        for at, label in enumerate(labels)
    }


def judge(operator, dtype, target, given, call, expected):
    """Return how many names differ, per output."""
    assert callable(getattr(isobit, operator))  # imports and declares it
    executors.prepare(operator, torch.float32)
    backend = Naming(target)
    with backends.use(backend):
        found = call(*given.values())
    found = (found,) if isinstance(found, torch.Tensor) else found
    named = {
        label: names.input_names(label, t.numel(), 8 * t.element_size()).reshape(t.shape)
        for label, t in given.items()
    }
    plan = Arithmetic(Names(), dtype, ENGINE_OF_TARGET[target])
    want = expected(plan, *named.values())
    want = (want,) if isinstance(want, np.ndarray) else want
    assert len(found) >= len(want)
    pairs = zip(found[: len(want)], want, strict=True)
    return [int((backend.names_of(out) != names_of_plan).sum()) for out, names_of_plan in pairs]


def rms_norm_grads(dtype, target, rows, n, samples=SAMPLES, spans=SPANS, planned=None):
    def call(grad, x, weight, scales):
        backward = torch.ops.isobit.triton_rms_norm_backward
        return backward(grad, x, weight, scales, spans, False)

    def expected(plan, grad, x, weight, scales):
        return gradients.rms_norm_grads(plan, grad, x, weight, scales, planned or samples)

    given = inputs(dtype, rows, n, "grad", "x", "weight", "scales")
    return judge("rms_norm", dtype, target, given, call, expected)


def layer_norm_grads(dtype, target):
    def call(grad, x, weight, means, scales):
        backward = torch.ops.isobit.triton_layer_norm_backward
        return backward(grad, x, weight, means, scales, SPANS)

    def expected(plan, grad, x, weight, means, scales):
        return gradients.layer_norm_grads(plan, grad, x, weight, means, scales, SAMPLES)

    given = inputs(dtype, 266, 3, "grad", "x", "weight", "means", "scales")
    return judge("layer_norm", dtype, target, given, call, expected)


def layer_norm(dtype, target):
    return judge(
        "layer_norm",
        dtype,
        target,
        inputs(dtype, 2, 530, "x", "weight", "bias"),
        lambda x, weight, bias: torch.ops.isobit.triton_layer_norm(x, weight, bias, 1e-5, None),
        lambda plan, x, weight, bias: gradients.layer_norm(plan, x, weight, bias, 1e-5),
    )


def softmax_grad(dtype, target):
    return judge(
        "softmax",
        dtype,
        target,
        inputs(dtype, 2, 530, "grad", "y"),
        lambda grad, y: torch.ops.isobit.triton_softmax_backward(grad, y),
        gradients.softmax_grad,
    )


def log_softmax_grad(dtype, target):
    return judge(
        "log_softmax",
        dtype,
        target,
        inputs(dtype, 2, 530, "grad", "y"),
        lambda grad, y: torch.ops.isobit.triton_log_softmax_backward(grad, y),
        gradients.log_softmax_grad,
    )


CASES = {
    "gradients of rms_norm": lambda dtype, target: rms_norm_grads(dtype, target, 266, 3),
    "gradients of layer_norm": layer_norm_grads,
    "layer_norm": layer_norm,
    "gradient of softmax": softmax_grad,
    "gradient of log_softmax": log_softmax_grad,
}


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(CASES, ["f32", "bf16", "f16", "bf16", "f32"], strict=True))
)
@pytest.mark.sweep(2)
def test_names_are_those_of_the_plan(name, dtype):
    found = CASES[name](dtype, "sm_90")
    assert len(found) >= 1
    assert not any(found)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_names_on_every_target(name, dtype, target):
    found = CASES[name](dtype, target)
    assert len(found) >= 1
    assert not any(found)


def test_other_samples_have_other_names():
    """The same tokens as two samples: dx is the same, and every column of dweight is another expression."""
    other = isobit.Samples.packed([133, 133])
    spans = torch.tensor(other.spans)
    assert rms_norm_grads("f32", "sm_80", 266, 3, other, spans) == [0, 0]
    assert rms_norm_grads("f32", "sm_80", 266, 3, other, spans, SAMPLES) == [0, 3]
