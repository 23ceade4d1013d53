"""Tell another order of addition from an error: both results against the same operator in fp64.

[Note: what rounding explains] One unit in the last place of the result is always allowed. Beyond it:

- a sum of products (`SUMS`): four roundings of fp32 for each term, times the sum of the terms' magnitudes. A sum in any
  order, with accumulators of fp32 or wider, stays below;
- an elementwise operator: a few roundings of the result;
- any other operator: how far each element moves when its inputs are rounded, which is measured in fp64 by changing
  every input by ± one rounding at random (`sensitivity.py`). If an element depends on n inputs with derivatives a_i,
  that is the root of Σ (a_i x_i)², and the worst order of a sum of n terms moves it by at most n · √n of it. Such a
  kernel may also round its steps to the narrowest floating dtype that it is given: attention in bf16 returns an fp32
  logsumexp of products that it rounded to bf16.

[Note: what an approximation explains] Kernels may compute exp, tanh, a reciprocal or a root with fewer bits than their
results have (hardware gives 10 to 12 bits, vectorized exponentials about 20), or multiply in TF32 with 11. Such an
error is at most `APPROXIMATION` of the element and of what it moves with its inputs. Sums of products and plain
arithmetic have no step that could be approximated, so there a larger error than rounding explains is a bug.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.judging.remedies import ours_for
from isobit.auditing.labels.moving import SORTS, sorted_dimension
from isobit.auditing.records import ERROR, ORDER, RANDOM, Accuracy
from isobit.auditing.replay.call import (
    Call,
    flatten,
    operator_name,
    results_of,
    tensors_of,
    unflatten,
)
from isobit.auditing.replay.replay import may_draw
from isobit.bits import as_integers

# Measure how far each element of a result moves when the inputs are rounded, and on how many inputs it depends.

Change = Callable[[Tensor], Tensor]
# The share of inputs that each draw changes. Full draws measure how far an element moves; sparse ones leave an element
# as it is unless one of its inputs was drawn, which shows how many it has. An element of two inputs that nearly cancel
# does not move in a draw that changes both alike, which is every second one: FULL such draws miss it once in 2^16.
FULL = 16
SHARES = (1.0, 1.0, 1.0, 1.0, 0.5, 0.125, 2.0**-6, 2.0**-9, *[1.0] * (FULL - 4))
CHANCE = 0.1  # of what a full draw moves: above it, two equal calls differ by more than fp64's rounding explains
MOST = 0.98  # a share of changed elements above which a draw says only that there are many inputs


def sensitivity(
    run: Callable[[Change], Tensor], result: Tensor, rounding: float
) -> tuple[Tensor, int]:
    """Return how far each element moves per relative change of its inputs, and how many inputs an element has.

    Args:
        run: Computes the result in fp64 with every floating input changed by a function.
        result: The result for inputs as they are.
        rounding: The relative size of a change.

    Returns:
        The root of Σ (a_i x_i)² for derivatives a_i, and the estimated number of inputs x_i. Zeros and 1 where two
        calls with the same inputs differ about as much: then rounding of inputs explains nothing.
    """
    squares = torch.zeros_like(result)
    inputs = 1.0
    by_chance = finite(run(lambda value: value) - result).norm()
    for number, share in enumerate(SHARES):
        generator = torch.Generator().manual_seed(number)
        moved = run(lambda value, s=share, g=generator: changed(value, s, rounding, g))  # type: ignore[misc]
        apart = finite(moved - result)
        if not number and by_chance > CHANCE * apart.norm():
            return squares, 1
        squares += apart * apart
        inputs = max(inputs, inputs_by(float((apart != 0).double().mean()), share))
    return (squares / sum(SHARES)).sqrt() / rounding, math.ceil(inputs)


def finite(values: Tensor) -> Tensor:
    """Return values with zeros where they are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def changed(value: Tensor, share: float, rounding: float, generator: torch.Generator) -> Tensor:
    """Change a share of elements by ± one rounding."""
    drawn = torch.rand(value.shape, generator=generator).to(value.device)
    sign = torch.where(drawn < share / 2, 1.0, -1.0) * (drawn < share)
    return value * (1 + rounding * sign.to(value.dtype))


def inputs_by(moved: float, share: float) -> float:
    """Return how many inputs an element has, if a draw of this share of inputs moved this share of elements."""
    if share == 1.0 or moved == 0.0:
        return 1.0
    return math.log1p(-min(moved, MOST)) / math.log1p(-share)


ROUNDING = 2.0**-24  # of the fp32 accumulators that all kernels here have at least
FEW = 8  # roundings that an elementwise operator may make
APPROXIMATION = 2.0**-10  # the relative error of the coarsest approximation; see the note
COARSEST = torch.finfo(
    torch.bfloat16
).eps  # to which kernels round steps; fp8 is a dtype of inputs alone
# Operators whose result is a sum of products of their arguments: of |arguments|, it is the sum of |terms|.
SUMS = {
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::matmul",
    "aten::convolution",
    "aten::sum",
    "aten::mean",
    "aten::cumsum",
    "aten::_grouped_mm",
    "aten::index_add",
    "aten::embedding_dense_backward",
}
# Elementwise operators that are rounded exactly, without an approximation.
ARITHMETIC = {
    f"aten::{name}{end}"
    for name in [
        *("add", "sub", "rsub", "mul", "div", "sqrt", "reciprocal", "neg", "abs", "relu", "clamp"),
        *("maximum", "minimum", "addcmul", "addcdiv", "lerp", "where", "masked_fill"),
    ]
    for end in ("", "_")
}


def explain(
    call: Call, run: Tensor, variant: Tensor, which: int = 0, parts: Sequence[Tensor] = ()
) -> tuple[str, Accuracy]:
    """Return whether a difference is one of order, an error, or random; and both errors.

    An error is given as a multiple of what rounding explains, the largest of the elements that differ; see
    [Note: what rounding explains].

    Args:
        call: The operator with the variant's arguments.
        run: The rows of the audited run's result.
        variant: The variant's result.
        which: Which of the operator's results this is.
        parts: If the variant's result is a sum over samples, each sample's part of it.
    """
    if draws_numbers(call):
        return RANDOM, Accuracy("none")
    if not run.is_floating_point():
        return choices(call, run, variant)
    if not parts:
        call, run, variant = where_different(call, run, variant)
    try:
        wide = reference(call, which)
        merging = by_merging(call, which, parts)
        allowed, approximate = (b + merging for b in bounds(call, wide, which, variant.dtype))
    except Exception:  # an operator may raise anything where it has no fp64 kernel
        return without_reference(run, variant)
    if wide.shape != variant.shape:
        return without_reference(run, variant)
    differ = as_integers(run) != as_integers(variant)
    errors = [worst(value[differ], wide[differ], allowed[differ]) for value in (run, variant)]
    kind = ERROR if max(errors) > 1 or not all(e == e for e in errors) else ORDER
    made = ours_for(call) if which == 0 and not parts else None
    ours = None if made is None else worst(made()[differ], wide[differ], allowed[differ])
    explained = kind == ERROR and all(
        worst(value[differ], wide[differ], approximate[differ]) <= 1 for value in (run, variant)
    )
    return kind, Accuracy("fp64", errors[0], errors[1], ours, explained)


def choices(call: Call, run: Tensor, variant: Tensor) -> tuple[str, Accuracy]:
    """Judge whole numbers: positions of equal keys may come in any order, all else is wrong."""
    keys = next((v for v in call.args if isinstance(v, Tensor)), None)
    name = operator_name(call.func)
    if name not in SORTS or keys is None or run.dtype != torch.int64 or keys.dim() != run.dim():
        return ERROR, Accuracy("none")
    along = sorted_dimension(call.func, list(call.args))
    same = torch.equal(keys.gather(along, run), keys.gather(along, variant))
    return (ORDER if same else ERROR), Accuracy("keys")


def where_different(call: Call, run: Tensor, variant: Tensor) -> tuple[Call, Tensor, Tensor]:
    """Return a product of two matrices only for the rows and columns in which its two results differ."""
    name = operator_name(call.func)
    if name not in ("aten::mm", "aten::addmm") or run.shape != variant.shape:
        return call, run, variant
    left, right = call.args[-2:]
    if run.shape != (left.shape[0], right.shape[1]):
        return call, run, variant
    differ = as_integers(run) != as_integers(variant)
    rows, columns = differ.any(1).nonzero().flatten(), differ.any(0).nonzero().flatten()
    args = [left[rows], right[:, columns]]
    if name == "aten::addmm":
        bias = call.args[0]
        if bias.dim() == 2 and len(bias) > 1:
            bias = bias[rows]
        args = [bias[..., columns], *args]
    cut = (rows[:, None], columns)
    return Call(call.func, tuple(args), call.kwargs), run[cut], variant[cut]


def draws_numbers(call: Call) -> bool:
    """Return whether an operator draws random numbers: whether a generator's state changes."""
    if not may_draw(call.func):
        return False
    flat, spec = flatten(call.func, call.args, call.kwargs)
    copies = [v.clone() if isinstance(v, Tensor) else v for v in flat]
    args, kwargs = unflatten(call.func, copies, spec)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        before = random_states()
        call.func(*args, **kwargs)
        return not all(map(torch.equal, before, random_states()))


def random_states() -> list[Tensor]:
    """Return the states of the generators of all devices."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.random.get_rng_state(), *cuda]


def without_reference(run: Tensor, variant: Tensor) -> tuple[str, Accuracy]:
    """Judge by the difference alone, where there is nothing to compare with."""
    wide = torch.maximum(run.double().abs(), variant.double().abs())
    top = wide.amax(-1, keepdim=True) if wide.dim() else wide
    allowed = 2 * units(wide, run.dtype) + 2 * torch.finfo(run.dtype).eps * top
    if worst(run, variant.double(), allowed) <= 1:
        return ORDER, Accuracy("none")
    explained = worst(run, variant.double(), allowed + 2 * APPROXIMATION * top) <= 1
    return ERROR, Accuracy("none", approximation=explained)


def reference(call: Call, which: int) -> Tensor:
    """Return the result in fp64."""
    result = run_wide(call)[which]
    if result.dtype != torch.float64:
        raise TypeError(f"{operator_name(call.func)} returned {result.dtype} for fp64")
    return result


def run_wide(call: Call, change: Change | None = None) -> list[Tensor]:
    """Return the results for arguments in fp64, each of them changed if asked for."""
    args, kwargs = widen(call.args, change), widen(call.kwargs, change)
    known = REFERENCES.get(operator_name(call.func))
    if known is not None:
        return tensors_of(known(*args, **kwargs))
    flat, spec = flatten(call.func, args, kwargs)
    return results_of(call.func, flat, spec, call.func(*args, **kwargs))


def widen(values: Any, change: Change | None = None) -> Any:
    """Return arguments with floating tensors in fp64, changed if asked for."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            wide = value.detach().to(torch.float64, copy=True)
            return wide if change is None else change(wide)
        return value

    if isinstance(values, dict):
        # A dtype argument would narrow the result again.
        return {name: one(v) for name, v in values.items() if not isinstance(v, torch.dtype)}
    return tuple(
        type(v)(one(w) for w in v) if isinstance(v, (list, tuple)) else one(v) for v in values
    )


def bounds(call: Call, wide: Tensor, which: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest error of each element that rounding explains, and that an approximation explains."""
    own = units(wide, dtype) + 4 * FEW * ROUNDING * wide.abs()
    name = operator_name(call.func)
    if torch.Tag.pointwise in call.func.tags:
        if name in ARITHMETIC:
            return own, own
        given = [v.double().abs() for v in floating(call) if is_broadcast(v, wide)]
        return own, own + APPROXIMATION * sum(given, wide.abs())
    if name in SUMS:
        sizes = [v.shape for v in tensors_of((call.args, call.kwargs))]
        terms = max([FEW, *(size for shape in sizes for size in shape)])
        scale = run_wide(call, change=torch.abs)[which].abs()
        allowed = units(wide, dtype) + 4 * terms * ROUNDING * scale
        return allowed, allowed
    eps = torch.finfo(dtype).eps
    moved, inputs = sensitivity(lambda change: run_wide(call, change)[which], wide, eps / 2)
    terms = max(FEW, inputs)
    # Kernels of several steps may round their steps to the narrowest dtype that they are given.
    narrowest = max([eps, *(torch.finfo(v.dtype).eps for v in floating(call))])
    steps = 4 * float(terms) ** 1.5 * ROUNDING + FEW * max(eps, min(narrowest, COARSEST))
    allowed = own + steps * moved
    return allowed, allowed + APPROXIMATION * (wide.abs() + moved)


def floating(call: Call) -> list[Tensor]:
    """Return the floating-point tensors among the arguments."""
    return [v for v in tensors_of((call.args, call.kwargs)) if v.is_floating_point()]


def is_broadcast(value: Tensor, wide: Tensor) -> bool:
    """Return whether an argument of an elementwise operator has the result's shape, or a smaller one."""
    sizes = zip(reversed(value.shape), reversed(wide.shape), strict=False)
    return value.dim() <= wide.dim() and all(a in (1, b) for a, b in sizes)


def by_merging(call: Call, which: int, parts: Sequence[Tensor]) -> Tensor | float:
    """Return what adding samples' parts in their own dtype may add to the error."""
    if not parts:
        return 0.0
    scale = torch.stack([part.double().abs() for part in parts]).sum(0)
    scale = scale + run_wide(call, torch.abs)[which].abs().nan_to_num()
    return (len(parts) + 1) * torch.finfo(parts[0].dtype).eps * scale


def units(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one unit in the last place of this dtype at each value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(wide.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(wide, info.eps), exponent - 1)


def worst(value: Tensor, wide: Tensor, allowed: Tensor) -> float:
    """Return the largest error as a multiple of what is allowed; infinite where only one of them is finite."""
    if value.numel() == 0:
        return 0.0
    given = value.double()
    same = (given == wide) | (given.isnan() & wide.isnan())
    ratio = ((given - wide).abs() / allowed).nan_to_num(nan=float("inf"))
    return float(torch.where(same, 0.0, ratio).max())


def attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition, and the log-sum-exp of every query's scores."""
    if q.shape[-3] != k.shape[-3]:  # several query heads share a head of keys
        shared = q.shape[-3] // k.shape[-3]
        k, v = (t.repeat_interleave(shared, -3) for t in (k, v))
    scale = named.get("scale")
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = named.get("attn_mask")
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, *rest: Any) -> Tensor:
    """Compute a product per group of rows."""
    if offs is None:
        return x @ weight
    ends = offs.tolist()
    if x.dim() == weight.dim() == 2:  # a gradient of weights: rows are added, group by group
        return torch.stack([x[:, a:b] @ weight[a:b] for a, b in itertools.pairwise([0, *ends])])
    parts = [x[a:b] @ weight[g] for g, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weight.shape[-1])])


# Operators that have no fp64 kernel, by definition.
REFERENCES: dict[str, Any] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention,
    "aten::_grouped_mm": grouped_mm,
}
