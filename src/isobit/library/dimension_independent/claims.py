"""Predicates of dimension-independent-kernels-v1: a kernel made for one shape, and how many binaries there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation import backends, native
from isobit.foundation.launches import record_launches
from isobit.order.evaluate import add_fp32, fma_fp32
from isobit.order.plan import FeaturePlan
from isobit.order.tree import merge

# Rows of further calls, in one tile with the 17 of a case; for 32, a multiple of 16, Triton compiles again if it may.
ROWS = (18, 31, 32)


@cache
def program_for(extent: int) -> Callable[[list[float], list[float]], float]:
    """Return a program made for sums of `extent` fp32 products: every step is written out, without sizes or loops."""
    lines = ["def program(x, w):"]
    names = []
    for number, segment in enumerate(FeaturePlan(extent).products):
        name = f"s{number}"
        for leaf in segment:
            lines.append(" t = 0.0")
            lines += [
                f" t = fma(x[{at}], w[{at}], t)"
                for at in range(leaf.start, leaf.start + leaf.length)
            ]
            lines.append(f" {name} = add({name}, t)" if leaf.fold else f" {name} = t")
        names.append(name)

    def add(left: str, right: str) -> str:
        lines.append(f" m{len(lines)} = add({left}, {right})")
        return f"m{len(lines) - 1}"

    total = merge(names, add)
    lines.append(f" return {total}")
    known: dict[str, Any] = {"fma": fma_fp32, "add": add_fp32}
    exec(compile("\n".join(lines), f"<a sum of {extent} products>", "exec"), known)
    made: Callable[[list[float], list[float]], float] = known["program"]
    return made


def made_for_the_shape(subject: Any, case: Case, tally: Tally) -> None:
    """Compare with kernels that are made for the shape of the case, bit for bit.

    On every executor, the first and the last row with a program that is written out for K; where Triton kernels are
    compiled, all rows with kernels whose number of rows is a constant.
    """
    x, weight, bias = case.arguments.values()
    y = subject(x, weight, bias)
    program = program_for(x.shape[-1])
    factors, offsets, ends = weight.tolist(), bias.tolist(), [0, -1]
    expected = [
        [add_fp32(program(row, w), b) for w, b in zip(factors, offsets, strict=True)]
        for row in x[ends].tolist()
    ]
    tally.same(
        y[ends], torch.tensor(expected, dtype=torch.float32), "against the program made for K"
    )
    backend = backends.chosen()
    if backend is not None and backend.kind == "machine":
        from isobit.certifying.running.backends import MachineBackend

        assert isinstance(backend, MachineBackend)
        constant: list[str] = []
        made = replace(backend, prepare=lambda call: with_constant_sizes(call, constant))
        with backends.use(made):
            special = subject(x, weight, bias)
        tally.same(y, special, "against kernels compiled for the shape")
        tally.compared += 1
        if not constant:
            tally.fail("no kernel was compiled for the shape")


def with_constant_sizes(call: Any, constant: list[str]) -> Any:
    """Return a call of a kernel that is compiled for its number of rows, and note what became constant."""
    order = list(call.signature)
    names = [name for name in ("M", "FIRST") if call.signature.get(name) == "i32"]
    if "partial" in order:  # merge_segments converts M, which only a number at launch allows
        return call
    constant += names
    return replace(
        call,
        signature={n: "constexpr" if n in names else kind for n, kind in call.signature.items()},
        constants={**call.constants, **{(order.index(n),): call.bound[n] for n in names}},
        attributes={at: v for at, v in call.attributes.items() if order[at[0]] not in names},
    )


def count_binaries() -> int:
    """Return how many binaries this process has: of the chosen backend's compiler, else native libraries."""
    backend = backends.chosen()
    if backend is None:
        return native.load_count()
    from isobit.certifying.running.backends import compiler_for

    return len(compiler_for(backend.target).done)


def one_binary(subject: Any, case: Case, tally: Tally) -> None:
    """Check that other numbers of rows are launched with their own sizes, by the binaries of the case's number."""
    x, weight, bias = case.arguments.values()
    subject(x, weight, bias)
    before = count_binaries()
    for rows in ROWS:
        other = x[:1].expand(rows, -1).contiguous()
        with record_launches() as seen:
            subject(other, weight, bias)
        tally.compared += 2
        if not any(launch.named() == {**case.sizes, "rows": rows} for launch in seen):
            tally.fail(f"{[launch.named() for launch in seen]} for {rows} rows of {case.sizes}")
        if count_binaries() != before:
            tally.fail(f"{count_binaries() - before} more binaries for {rows} rows of {case.sizes}")
            before = count_binaries()
