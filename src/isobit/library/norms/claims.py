"""What the contracts of norms claim beyond the library: gradients of weights over samples, executors, small rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case, mirror
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.library.linear.claims import SAMPLE_LENGTHS, moved, spread
from isobit.machine import thread_count
from isobit.ops.layer_norm import portable as layer_portable
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import sum_samples
from isobit.ops.rms_norm import portable as rms_portable
from isobit.order.samples import Samples

Subject = Callable[..., Tensor]
Sums = Callable[[Tensor, Samples, int], Tensor]

HEADS = 6  # two segments of three
EPS = 1e-6


def parameters_of(case: Case) -> list[Tensor]:
    """Weight, and bias where there is one."""
    return [t for name, t in case.arguments.items() if name != "x"]


def parameter_grads(
    subject: Subject, x: Tensor, parameters: Sequence[Tensor], grad: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Of every parameter, by autograd."""
    leaves = [p.detach().requires_grad_() for p in parameters]
    with torch.enable_grad():
        return torch.autograd.grad(subject(x, *leaves, **options), leaves, grad)


def cancelling_tokens(case: Case, heads: int) -> tuple[Tensor, Tensor]:
    """(grad, x) of packed tokens whose terms cancel, so that a change of order shows through any rounding."""
    width = max(heads, 1) * case.sizes["n"]
    grad, x = (case.draw((sum(SAMPLE_LENGTHS), width), stream, "wide") for stream in (8, 9))
    return mirror(grad, 0, -1), mirror(x, 0, 1)


def samples(subject: Subject, case: Case, tally: Tally) -> None:
    """Gradients of parameters are one sum over the samples: packed, padded, in any storage, by any threads."""
    one_sum(subject, case, tally, 0)


def head_samples(subject: Subject, case: Case, tally: Tally) -> None:
    """The same with heads."""
    one_sum(subject, case, tally, 0)
    one_sum(subject, case, tally, HEADS)


def one_sum(subject: Subject, case: Case, tally: Tally, heads: int) -> None:
    parameters, lengths = parameters_of(case), SAMPLE_LENGTHS
    grad, x = cancelling_tokens(case, heads)
    described, options = Samples.packed(lengths), {"heads": True} if heads else {}

    def compare(x: Tensor, grad: Tensor, described: Samples, where: str) -> None:
        for at, (left, right) in enumerate(zip(whole, found(x, grad, described), strict=True)):
            tally.same(left, right, f"parameter {at}, {heads} heads, {where}")

    def found(x: Tensor, grad: Tensor, described: Samples) -> tuple[Tensor, ...]:
        if heads:
            x, grad = (t.view(len(t), heads, -1) for t in (x, grad))
        return parameter_grads(subject, x, parameters, grad, samples=described, **options)

    tally.count(len(x))
    whole = found(x, grad, described)
    for side in ("left", "right"):
        padded = Samples.padded(lengths, width=max(lengths) + 5, side=side)
        compare(
            spread(case, x, padded, 11), spread(case, grad, padded, 10), padded, f"padded {side}"
        )
    apart = Samples(*moved(described))
    compare(
        spread(case, x, apart, 12),
        spread(case, grad, apart, 13),
        apart,
        "samples stored in reverse",
    )
    for name, store in LAYOUTS.items():
        compare(store(x), store(grad), described, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(x, grad, described, f"{threads} threads")


def forward_of(x: Tensor, given: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, means, scales) by the portable executor: one parameter is a root-mean-square norm's."""
    if len(given) == 2:
        return layer_portable.layer_norm(x, given[0], given[1], eps)
    y, scales = rms_portable.rms_norm(x, given[0], eps)
    return y, torch.zeros_like(scales), scales


def backward_of(
    grad: Tensor,
    x: Tensor,
    given: Sequence[Tensor],
    statistics: Sequence[Tensor],
    described: Samples,
    heads: int,
) -> tuple[Tensor, ...]:
    """dx and the parameters' gradients, likewise."""
    means, scales = statistics
    if len(given) == 2:
        return layer_portable.layer_norm_backward(grad, x, given[0], means, scales, described)
    return rms_portable.rms_norm_backward(grad, x, given[0], scales, described, heads)


def gradients_agree(subject: Subject, case: Case, tally: Tally) -> None:
    """dx and the parameters' gradients have the portable executor's bits: padding, several samples, heads."""
    parameters = parameters_of(case)
    described = Samples.padded((40, 0, 257), width=260, side="left")
    for heads in (0, HEADS) if len(parameters) == 1 else (0,):
        shape = (
            (described.rows, heads, case.sizes["n"]) if heads else (described.rows, case.sizes["n"])
        )
        x, grad = case.draw(shape, 20, "wide"), case.draw(shape, 21, "wide")
        options: dict[str, Any] = {"samples": described, "eps": EPS} | (
            {"heads": True} if heads else {}
        )
        tally.count(described.rows)
        leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
        with torch.enable_grad():
            found = torch.autograd.grad(subject(*leaves, **options), leaves, grad)
        expected = backward_of(
            grad, x, parameters, forward_of(x, parameters, EPS)[1:], described, heads
        )
        for at, (mine, other) in enumerate(zip(found, expected, strict=True)):
            tally.same(mine, other, f"gradient of argument {at}, {heads} heads")


def near_eps(subject: Subject, case: Case, tally: Tally) -> None:
    """Rows whose mean square is about eps, against fp64: where eps stands is then seen."""
    x = case.arguments["x"] * 2.0**-10
    exact = subject_of_fp64(x, parameters_of(case))
    error = (subject(x, *parameters_of(case), eps=EPS).double() - exact).abs()
    tally.count(case.rows)
    tally.true(
        error <= 2e-6 * exact.abs().amax(-1, keepdim=True), "over 2e-6 of the row's largest", error
    )


def subject_of_fp64(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Stock in fp64."""
    shape, wide = (x.shape[-1],), [p.double() for p in parameters]
    if len(wide) == 1:
        return F.rms_norm(x.double(), shape, wide[0], EPS)
    return F.layer_norm(x.double(), shape, wide[0], wide[1], EPS)


def refused_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls that no norm takes."""
    x, weight = torch.ones(2, 3), torch.ones(3)
    yield "a weight of another size", (x, torch.ones(4)), {}
    yield "a weight that is a matrix", (x, x), {}
    yield "no features", (torch.ones(2, 0), torch.ones(0)), {}
    yield "two dtypes", (x, weight.bfloat16()), {}
    yield "integers", (x.int(), weight.int()), {}
    yield "a sparse input", (x.to_sparse(), weight), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}
    yield "a negative eps", (x, weight), {"eps": -1e-6}
    yield "an eps that is no number", (x, weight), {"eps": float("nan")}
    yield "samples that do not describe the rows", (x, weight), {"samples": Samples.packed([3])}


# ---- planted --------------------------------------------------------------------------------------------


class WithSums(torch.autograd.Function):
    """A norm that is right but for its parameters' gradients, which `sums(terms, samples, heads)` adds."""

    @staticmethod
    def forward(
        ctx: Any, sums: Sums, described: Samples, heads: int, eps: float, x: Tensor, *given: Tensor
    ) -> Tensor:
        ctx.sums, ctx.described, ctx.heads = sums, described, heads
        y, *statistics = forward_of(x, given, eps)
        ctx.save_for_backward(x, *given, *statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *given, means, scales = ctx.saved_tensors
        dx, *_ = backward_of(grad, x, given, (means, scales), ctx.described, ctx.heads)
        grad_rows = grad.reshape(-1, x.shape[-1]).float()
        normal = (x.reshape(-1, x.shape[-1]).float() - means.reshape(-1, 1)) * scales.reshape(-1, 1)
        terms = [grad_rows * normal, grad_rows][: len(given)]
        found = [ctx.sums(t, ctx.described, ctx.heads).to(x.dtype) for t in terms]
        return None, None, None, None, dx, *found


def with_sums(sums: Sums) -> Subject:
    """A subject of either contract."""

    def norm(
        x: Tensor,
        *parameters: Tensor,
        eps: float = EPS,
        samples: Samples | None = None,
        heads: bool = False,
    ) -> Tensor:
        described = samples or whole_samples(x.select(-2, 0) if heads else x, None)
        return WithSums.apply(  # type: ignore[no-any-return, no-untyped-call]
            sums, described, x.shape[-2] if heads else 0, eps, x, *parameters
        )

    return norm


def tokens_of(terms: Tensor, heads: int) -> Tensor:
    """[tokens, heads, n]."""
    return terms.view(-1, max(heads, 1), terms.shape[1])


def real_rows(terms: Tensor, described: Samples, heads: int) -> Tensor:
    """[real tokens, heads, n], in the order of the samples."""
    rows = tokens_of(terms, heads)
    return torch.cat([rows[start : start + length] for start, length in described.spans])


def chain_of(rows: Tensor) -> Tensor:
    """One running sum over the first axis, rounded at every step."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


padding_counted = with_sums(lambda terms, described, heads: tokens_of(terms, heads).sum((0, 1)))
one_chain = with_sums(
    lambda terms, described, heads: chain_of(real_rows(terms, described, heads).flatten(0, 1))
)
heads_before_samples = with_sums(
    lambda terms, described, heads: sum_samples(tokens_of(terms, heads).sum(1), described)
)
bf16_sums = with_sums(
    lambda terms, described, heads: chain_of(
        real_rows(terms, described, heads).flatten(0, 1).bfloat16()
    )
)


def _anchored(terms: Tensor, described: Samples, heads: int) -> Tensor:
    real = torch.zeros(described.rows, dtype=torch.bool)
    for start, length in described.spans:
        real[start : start + length] = True
    masked = torch.where(real[:, None, None], tokens_of(terms, heads), 0.0).flatten(1)
    count = max(len(described.spans), 1)
    width = described.rows // count
    grid = Samples.packed([*[width] * (count - 1), described.rows - width * (count - 1)])
    return rms_portable.sum_heads(masked.reshape(-1, terms.shape[1]), grid, max(heads, 1))


leaves_at_padding = with_sums(_anchored)
