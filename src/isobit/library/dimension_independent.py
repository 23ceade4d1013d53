"""Predicates of dimension-independent-kernels-v1: a kernel made for one shape, and how many binaries there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation import backends, native
from isobit.foundation.launches import Launch, record_launches
from isobit.ops.registration import PREFIXES
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
    names = [name for name in ("m", "first_tile") if call.signature.get(name) == "i32"]
    if "partial" in order:  # merge_segments converts m, which only a number at launch allows
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


class Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect the names of isobit's operators that run, whatever was recorded of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operator, and run it."""
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "isobit":
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """A backend that notes the number of rows of each kernel after it ran."""

    inner: backends.Backend
    rows: list[int] = field(default_factory=list, compare=False)

    @property
    def kind(self) -> str:
        """Return the name."""
        return self.inner.kind

    @property
    def target(self) -> str:
        """Return the GPU."""
        return self.inner.target

    @property
    def engine(self) -> str:
        """Return the arithmetic of matrix products."""
        return self.inner.engine

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Run one kernel; its rows are what it is given as m at launch, not a constant of its binary."""
        self.inner.launch(kernel, grid, args, constants, options)
        self.rows.extend(
            value for name, value in zip(kernel.arg_names, args, strict=False) if name == "m"
        )


def rows_launched(call: Callable[[], Any]) -> tuple[list[Launch], set[str], list[int] | None]:
    """Return what a call recorded, which operators ran, and the rows of each kernel on a chosen backend."""
    backend = backends.chosen()
    counted = None if backend is None else Counted(backend)
    with (
        record_launches() as seen,
        Ran() as ran,
        nullcontext() if counted is None else backends.use(counted),
    ):
        call()
    return seen, ran.names, None if counted is None else counted.rows


def one_binary(subject: Any, case: Case, tally: Tally) -> None:
    """Check that other numbers of rows are launched with their own sizes, by the binaries of the case's number.

    A launch counts where its operator ran, and on a backend where its kernels ran with the number of rows.
    """
    x, weight, bias = case.arguments.values()
    subject(x, weight, bias)
    before = count_binaries()
    for rows in ROWS:
        other = x[:1].expand(rows, -1).contiguous()
        seen, ran, kernels = rows_launched(partial(subject, other, weight, bias))
        tally.compared += 3
        if not any(launch.named() == {**case.sizes, "rows": rows} for launch in seen):
            tally.fail(f"{[launch.named() for launch in seen]} for {rows} rows of {case.sizes}")
        missing = {PREFIXES[launch.executor] + launch.operator for launch in seen} - ran
        if missing:
            tally.fail(f"{', '.join(sorted(missing))} did not run, though its launch was recorded")
        elif kernels is not None and set(kernels) != {rows}:
            tally.fail(f"kernels ran with {sorted(set(kernels))} rows, expected {rows}")
        if count_binaries() != before:
            tally.fail(f"{count_binaries() - before} more binaries for {rows} rows of {case.sizes}")
            before = count_binaries()
