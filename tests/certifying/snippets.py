"""Small PTX kernels for tests: each thread loads its operands, runs a few lines and stores %d."""

import numpy as np

from isobit.certifying.machine import Buffer, Machine
from isobit.certifying.ptx import parse

THREADS = 32
KINDS = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def text(body, sources=(32, 32, 32), out=32, threads=THREADS, shared=0, target="sm_80"):
    """The PTX of a kernel whose operands are %a, %b, %c and whose result is %d."""
    lines = [
        ".version 8.0",
        f".target {target}",
        ".address_size 64",
        ".visible .entry snippet(",
        ",\n".join(f".param .u64 .ptr .global .align 1 p{i}" for i in range(len(sources) + 1)),
        ")",
        f".reqntid {threads}",
        "{",
        ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %w<9>;",
        f".reg .b32 %t, %at; .reg .b64 %q, %o; .reg .b{out} %d;",
    ]
    if shared:
        lines.append(f".shared .align 16 .b8 memory[{shared}];")
    lines.append("mov.u32 %t, %tid.x;")
    for i, width in enumerate(sources):
        lines += [
            f".reg .b{width} %{'abc'[i]};",
            f"ld.param.b64 %q, [p{i}];",
            f"mul.wide.u32 %o, %t, {width // 8};",
            "add.s64 %o, %q, %o;",
            f"ld.global.b{width} %{'abc'[i]}, [%o];",
        ]
    lines += [
        f"ld.param.b64 %q, [p{len(sources)}];",
        f"mul.wide.u32 %o, %t, {out // 8};",
        "add.s64 %o, %q, %o;",
        body,
        f"st.global.b{out} [%o], %d;",
        "ret;",
        "}",
    ]
    return "\n".join(lines)


def run(body, *inputs, out=32, threads=THREADS, shared=0, concrete=False, **options):
    """Run a snippet on arrays of bits; returns the bits, the names and the machine."""
    widths = tuple(8 * each.dtype.itemsize for each in inputs)
    machine = Machine(parse(text(body, widths, out, threads, shared)), **options)
    result = np.zeros(threads, KINDS[out])
    buffers = [
        Buffer(each.view(KINDS[w]), label=f"x{i}", concrete=concrete)
        for i, (each, w) in enumerate(zip(inputs, widths, strict=True))
    ]
    made = Buffer(result, label="out", concrete=False)
    machine.run((1,), [*buffers, made], shared_bytes=0)
    names = made.element_names() if machine.names else None
    return result, names, machine


def names_of(body, inputs=3, width=32, out=32, threads=THREADS, shared=0):
    """The names of a snippet's results."""
    arrays = [np.arange(threads).astype(KINDS[width]) for _ in range(inputs)]
    return run(body, *arrays, out=out, threads=threads, shared=shared)[1]


def values(seed=0, count=THREADS):
    """fp32 values of many sizes, with zeros of both signs, infinities, NaN and subnormals."""
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)
    made = made.astype(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38]
    made[rng.permutation(count)[: len(special)]] = special
    return made
