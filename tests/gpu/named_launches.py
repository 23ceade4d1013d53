"""Run an operator's Triton executor in the PTX machine, with the names of what its launches compute."""

import numpy as np
import torch

from isobit.certifying.names import names
from isobit.foundation import backends
from tests.certifying.plan import operators
from tests.certifying.plan.domain import Names, Values
from tests.certifying.plan.operators import Arithmetic
from tests.certifying.running import Launch, Session, raw

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class NamingBackend:
    """A backend whose launches share their names; `inputs` are the tensors that expressions are made of."""

    def __init__(self, target, inputs):
        self.session, self.target = Session(target), target
        self.engine = self.session.engine
        for name, tensor in inputs.items():
            self.session.buffer(name, tensor)

    def launch(self, kernel, grid, args, constants, options):
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **constants}
        self.session.run(Launch(kernel, grid, arguments, dict(options)))


class Plan:
    """The plan of linear in both domains, for one dtype and the tensor core of a target."""

    def __init__(self, inputs, engine):
        dtype = SHORT[next(iter(inputs.values())).dtype]
        named = {
            name: names.input_names(name, t.numel(), 8 * t.element_size()).reshape(t.shape)
            for name, t in inputs.items()
        }
        values = {name: raw(t.detach()) for name, t in inputs.items()}
        self.domains = [
            (Arithmetic(Names(), dtype, engine), named),
            (Arithmetic(Values(), dtype, engine), values),
        ]

    def __call__(self, function):
        """Return names and bits of function(plan, inputs)."""
        return [function(plan, given) for plan, given in self.domains]


def forward(plan, given):
    total = operators.linear(plan, given["x"], given["weight"])
    if "bias" in given:
        total = plan.on.add(total, plan.widen(given["bias"]))
    return plan.result(total)


def input_grad(plan, given):
    return plan.result(operators.linear(plan, given["grad"], given["weight"].T))


def weight_grad(samples):
    def expected(plan, given):
        return plan.result(operators.weight_grad(plan, given["grad"], given["x"], samples))

    return expected


def run_named(target, inputs, function):
    """Return the result of function(inputs) with its names and the instructions that ran."""
    backend = NamingBackend(target, inputs)
    with backends.use(backend):
        y = function(**inputs)
    return y, backend.session.names_of(y), backend.session.opcodes


def count_differences(y, found, expected):
    """Return how many names and how many bits differ from the plan's."""
    want, values = expected
    assert found.size == y.numel() > 0
    bits = np.ascontiguousarray(values).view(np.uint8) != np.ascontiguousarray(raw(y)).view(
        np.uint8
    )
    return int((found.reshape(want.shape) != want).sum()), int(bits.sum())
