"""Launch a Triton kernel in the PTX machine, for a GPU that is not there."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.names import names as nm
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.certifying.ptx import parse
from isobit.certifying.running.compile import Compiler, specialise

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@cache
def compiler(target):
    return Compiler(target, resources=False)


def raw(tensor):
    """The memory of a tensor as numpy has it: 16-bit floats are uint16."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def draw(*shape, dtype, seed, spread=3):
    """Normal values times powers of two, so that the order of addition shows."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator)
    values = torch.ldexp(torch.randn(shape, generator=generator), exponent)
    return values.to(DTYPES[dtype])


@dataclass
class Launch:
    """One call of a kernel: the kernel, its grid, arguments by name, constants and options of Triton, or a function of
    the target that returns them."""

    kernel: object
    grid: tuple
    arguments: dict
    options: object

    def compile(self, target):
        """Return the compiled kernel."""
        options = self.options(target) if callable(self.options) else self.options
        named = {"enable_fp_fusion": False, "num_warps": 4, "num_stages": 2, **options}
        given = {**self.arguments, **named}
        call = specialise(self.kernel, target, (), given)
        return compiler(target).compile(self.kernel, call), call


class Session:
    """Runs launches one after another on tensors that keep their names.

    `engine` replaces the tensor core of the target, and `mutate` changes the PTX text of each launch.
    `watch.look(machine)` and `watch.after(machine)` are called around the instruction at `watch.line`.
    """

    def __init__(self, target, engine=None, names=True, mutate=None, races=True, watch=None):
        self.target, self.names, self.races = target, names, races
        self.engine = engine or ENGINE_OF_TARGET[target]
        self.mutate = mutate or (lambda kernel, text: text)
        self.buffers, self.executed, self.opcodes = {}, 0, set()
        self.hits, self.watch = Counter(), watch

    def buffer(self, name, tensor):
        key = tensor.data_ptr()
        if key not in self.buffers:
            self.buffers[key] = Buffer(raw(tensor), label=name)
            if tensor.is_floating_point() and self.names:  # a slice keeps the names of its elements
                first, bits = tensor.storage_offset(), 8 * tensor.element_size()
                halves = nm.inputs(name, first + tensor.numel(), bits)
                self.buffers[key].names = halves[first * bits // 16 :]
        return self.buffers[key]

    def run(self, launch):
        compiled, call = launch.compile(self.target)
        text = self.mutate(launch.kernel, compiled.ptx)
        program = compiled.program if text is compiled.ptx else parse(text)
        machine = Machine(program, self.engine, names=self.names, races=self.races)
        for buffer in self.buffers.values():
            buffer.access = None  # what an earlier launch did is done
        if self.watch is not None:
            look_around(machine, self.watch)
        arguments = [
            self.buffer(name, value) if isinstance(value, torch.Tensor) else value
            for name, value in call.bound.items()
            if call.signature[name] != "constexpr"
        ]
        machine.run(launch.grid, arguments, shared_bytes=compiled.shared_bytes)
        self.executed += machine.executed
        for index, count in enumerate(machine.hits):
            self.hits[program.name, index] += count
        self.opcodes |= set(machine.counts)
        return machine

    def names_of(self, tensor):
        return self.buffers[tensor.data_ptr()].element_names()


def look_around(machine, watch):
    """Call `watch.look` before and `watch.after` after the machine executes an instruction."""
    for index, instruction in enumerate(machine.program.instructions):
        if instruction.line == watch.line:
            step = machine.steps[index]

            def looking(state, mask, step=step):
                watch.look(machine)
                step(state, mask)
                watch.after(machine)

            machine.steps[index] = looking
