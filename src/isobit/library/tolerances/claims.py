"""Claims of tolerance-table-v1: each bound allows every right kernel, and at most 16 times its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.any_kernel import operators
from isobit.library.any_kernel.within import ROUNDOFF, UPSTREAM, Operator, Values, differentiate
from isobit.library.tolerances import kernels
from isobit.library.tolerances.kernels import Errors, Given, Rounded

# The least accurate kernel of each operator that is still right, with the errors that its roundings can have.
#
# [Note: the least accurate right kernel]
# It adds in fp32 in any order, and stores values where kernels that people use do: where one kernel hands them to the
# next. Each `stored` in kernels.py is one of those values. The bound of the table must allow
# every element's error, and not much more.

Forward = Callable[[Given], Rounded]
Backward = Callable[[Given, Rounded], Errors]
KERNELS: dict[str, tuple[type[Operator], Forward, Backward]] = {
    "attention": (
        operators.Attention,
        kernels.attention,
        kernels.attention_gradients,
    ),
    "cross_entropy": (
        operators.CrossEntropy,
        kernels.cross_entropy,
        kernels.cross_entropy_gradients,
    ),
    "embedding": (
        operators.Embedding,
        kernels.embedding,
        kernels.embedding_gradients,
    ),
    "gelu": (operators.Gelu, kernels.gelu, kernels.gelu_gradients),
    "gqa": (operators.Gqa, kernels.attention, kernels.attention_gradients),
    "layer_norm": (operators.LayerNorm, kernels.layer_norm, kernels.layer_norm_gradients),
    "linear": (operators.Linear, kernels.linear, kernels.linear_gradients),
    "log_softmax": (
        operators.LogSoftmax,
        kernels.log_softmax,
        kernels.log_softmax_gradients,
    ),
    "logprob": (operators.Logprob, kernels.logprob, kernels.logprob_gradients),
    "rms_norm": (operators.RmsNorm, kernels.rms_norm, kernels.rms_norm_gradients),
    "rope": (operators.Rope, kernels.rope, kernels.rope_gradients),
    "silu": (operators.Silu, kernels.silu, kernels.silu_gradients),
    "softmax": (operators.Softmax, kernels.softmax, kernels.softmax_gradients),
    "swiglu": (operators.Swiglu, kernels.swiglu, kernels.swiglu_gradients),
}


def exactly(given: Values) -> Errors:
    """Return arguments as values without errors."""
    return {name: Rounded.exact(t) for name, t in given.items()}


OUTPUT = "output"
LARGEST = 16.0  # how many times the derived error a bound may be, where it is closest
SAME = 1e-9  # of the magnitudes: both values are computed in fp64

# Bounds of an operator in a dtype, for its arguments and, for those of gradients, what arrives from above.
Bounds = Callable[[type[Operator], torch.dtype, Values, Tensor | None], Values]


@dataclass(frozen=True)
class Table:
    """Bounds of every operator, in every dtype and both directions."""

    bounds: Bounds

    def __call__(self, *given: Tensor) -> Tensor:
        """Return the unit roundoff of the arguments' dtype."""
        return torch.tensor(ROUNDOFF[given[0].dtype])


def allowed(
    kind: type[Operator], dtype: torch.dtype, given: Values, upstream: Tensor | None
) -> Values:
    """Return the bound of each element of the output, or of every gradient: what `isobit check` allows."""
    if upstream is None:
        return {OUTPUT: kind.output_bound(dtype, given)}
    return kind.gradient_bounds(dtype, given, upstream)


def forward(subject: Table, case: Case, tally: Tally) -> None:
    """The output's bound is derived."""
    kind, derived, _ = KERNELS[case.recipe.inputs]
    given = {name: t.double() for name, t in case.arguments.items()}
    exact = {OUTPUT: kind.call(kind.reference, *given.values())}
    bounds = subject.bounds(kind, case.dtype, given, None)
    judge(bounds, {OUTPUT: derived(exactly(given))}, exact, case, tally)


def backward(subject: Table, case: Case, tally: Tally) -> None:
    """Every gradient's bound is derived."""
    kind, _, derived = KERNELS[case.recipe.inputs]
    given = {name: t.double() for name, t in case.arguments.items()}
    reference = partial(kind.call, kind.reference)
    upstream = case.draw(tuple(reference(*given.values()).shape), UPSTREAM).double()
    found = derived(exactly(given), Rounded.exact(upstream))
    exact = differentiate(reference, given, upstream, list(found))
    judge(subject.bounds(kind, case.dtype, given, upstream), found, exact, case, tally)


def judge(
    bounds: Values, derived: dict[str, Rounded], exact: Values, case: Case, tally: Tally
) -> None:
    """Require bounds of the same numbers that allow each derived error, and are close to one of them."""
    tally.count(case.rows)
    tally.true(torch.tensor(bounds.keys() == derived.keys()), f"bounds of {sorted(bounds)}")
    closest = 0.0
    for name, rounded in derived.items():
        error, bound = error_of(rounded, case.dtype), bounds[name]
        size = rounded.wide + rounded.value.abs()
        same = (rounded.value - exact[name]).abs() <= SAME * size
        tally.true(same, f"{name}: the derivation computes another operator")
        inside = (error <= bound * (1 + SAME)) & (bound.shape == error.shape)
        tally.true(
            inside,
            f"{name}: an error that a right kernel can have is outside, in bounds",
            error / bound,
        )
        closest = max(closest, *(error / bound)[bound > 0].tolist(), 0.0)
    if any((bound > 0).any() for bound in bounds.values()):  # a bound of 0 cannot be smaller
        tally.within(1 / max(closest, 1e-30), LARGEST, 1, "the bound, in derived errors")


def error_of(rounded: Rounded, dtype: torch.dtype) -> Tensor:
    """Return the largest error in a dtype; fp32 stores what it computes."""
    wide = rounded.wide * (torch.finfo(torch.float32).eps / 2)
    narrow = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return wide + rounded.narrow * narrow


# ---- the table, and wrong ones --------------------------------------------------------------------------


def scaled(times: float) -> Table:
    """Allow more or less of everything."""
    return Table(lambda *asked: {name: t * times for name, t in allowed(*asked).items()})


def of_another_dtype(others: dict[torch.dtype, torch.dtype]) -> Table:
    """Take a dtype for another."""
    return Table(lambda kind, dtype, *rest: allowed(kind, others.get(dtype, dtype), *rest))


def _without_sums(kind: type[Operator], *asked: Any) -> Values:
    """Count no addition, as if sums were exact."""
    none = type("WithoutSums", (kind,), {"sums": staticmethod(lambda given: (0, 0))})
    return allowed(none, *asked)


def _relative(
    kind: type[Operator], dtype: torch.dtype, given: Values, upstream: Tensor | None
) -> Values:
    """Allow an error relative to the result, as if nothing cancelled."""
    reference = partial(kind.call, kind.reference)
    if upstream is None:
        exact = {OUTPUT: reference(*given.values())}
    else:
        exact = differentiate(reference, given, upstream, list(kind.gradients(given, upstream)))
    bounds = allowed(kind, dtype, given, upstream)
    return {name: torch.minimum(t, exact[name].abs() * 2.0**-6) for name, t in bounds.items()}


def _of_a_copy(kind: type[Operator], dtype: torch.dtype, given: Values, _: Tensor | None) -> Values:
    """Allow one rounding of a result that is copied."""
    return {OUTPUT: kind.call(kind.reference, *given.values()).abs() * torch.finfo(dtype).eps}


table = Table(allowed)
a_twentieth, twentyfold = scaled(1 / 20), scaled(20)
without_storage = of_another_dtype(dict.fromkeys(ROUNDOFF, torch.float32))
of_the_other_format = of_another_dtype(
    {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
)
without_sums, relative, of_a_copy = Table(_without_sums), Table(_relative), Table(_of_a_copy)
