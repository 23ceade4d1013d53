"""What the claims of all subjects share: gradients, placements of samples, types and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.errors import ArgumentError, IsobitError
from isobit.foundation.machine import thread_count
from isobit.order.samples import Samples

# Gradients by autograd, and planted kernels that are wrong in their gradients or in their values alone.

Backward = Callable[..., Sequence[Tensor | None]]  # (grad, *tensors) -> a gradient per tensor


def gradients(
    function: Callable[..., Any], tensors: Sequence[Tensor], grad: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of `function(*tensors, **options)` with respect to each tensor."""
    return forward_and_gradients(function, tensors, grad, **options)[1]


def forward_and_gradients(
    function: Callable[..., Any], tensors: Sequence[Tensor], grad: Any, **options: Any
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the output, which may be several tensors, and the gradients of each of `tensors`."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y = function(*leaves, **options)
    return y, torch.autograd.grad(y, leaves, grad)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, backward: Backward, *tensors: Tensor) -> Tensor:
        ctx.chosen = backward
        ctx.save_for_backward(*tensors)
        return function(*tensors)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.chosen(grad, *ctx.saved_tensors)


def with_backward(function: Callable[..., Tensor], backward: Backward, *tensors: Tensor) -> Tensor:
    """Call `function(*tensors)`; its gradients are what `backward(grad, *tensors)` returns."""
    return _WithBackward.apply(function, backward, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def with_value(right: Tensor, wrong: Tensor) -> Tensor:
    """Return the value of `wrong` with the gradient of `right`."""
    return with_backward(
        lambda right, wrong: wrong.clone(), lambda grad, *_: (grad, None), right, wrong
    )


# Placements of the samples of a batch in memory: packed, padded on a side, or stored in reverse.
#
# A claim about samples computes the packed batch once, moves the same rows to each placement among random
# padding, and compares bits.

# Unequal, one empty, one longer than a leaf of 256 tokens, one odd and longer than 512.
SAMPLE_LENGTHS = (11, 16, 0, 300, 13, 19, 1, 515)


def placements(lengths: Sequence[int], width: int) -> Iterator[tuple[str, Samples]]:
    """Yield a name and the samples: padded to `width` on either side, and stored in reverse."""
    for side in ("left", "right"):
        yield f"padded {side}", Samples.padded(lengths, width=width, side=side)
    yield "stored in reverse", in_reverse(Samples.packed(lengths))


def in_reverse(described: Samples) -> Samples:
    """Return the same samples, the last one first in memory, with a row of padding before each."""
    spans, at = [], 1
    for _, length in reversed(described.spans):
        spans.append((at, length))
        at += length + 1
    return Samples(tuple(reversed(spans)), at, 0, len(spans))


def put(room: Tensor, packed: Tensor, described: Samples) -> Tensor:
    """Write packed rows into `room` at the places of the samples, and return it."""
    at = 0
    for start, length in described.spans:
        room[start : start + length] = packed[at : at + length]
        at += length
    return room


def put_among_random(case: Case, packed: Tensor, described: Samples, stream: int) -> Tensor:
    """Return packed rows at the places of the samples; all other rows are random."""
    return put(case.draw((described.rows, *packed.shape[1:]), stream, "wide"), packed, described)


def rows_of(described: Samples) -> Tensor:
    """Return the indices of the samples' rows, in the order of the samples."""
    return torch.cat([torch.arange(start, start + length) for start, length in described.spans])


def is_real(described: Samples) -> Tensor:
    """Return a mask that is False at padding."""
    mask = torch.zeros(described.rows, dtype=torch.bool)
    for start, length in described.spans:
        mask[start : start + length] = True
    return mask


def in_every_storage_and_thread_count(
    compare: Callable[..., None], tensors: Sequence[Tensor], described: Samples
) -> None:
    """Call `compare(*tensors, described, where)` for every memory layout and every thread count."""
    for name, store in LAYOUTS.items():
        compare(*(store(t) for t in tensors), described, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(*tensors, described, f"{threads} threads")


# Types and checks that the claims of all subjects share: calls that must raise, thread counts, replaced parts.

Subject = Callable[..., Tensor]  # the function that a contract judges
Predicate = Callable[[Any, Case, Tally], None]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # description, positional arguments, keywords


def on_one_thread(predicate: Predicate) -> Predicate:
    """Run a predicate on one thread; small calls are slower on two.

    Predicates that compare thread counts set them inside.
    """

    @wraps(predicate)
    def run(subject: Any, case: Case, tally: Tally) -> None:
        with thread_count(1):
            predicate(subject, case, tally)

    return run


def must_raise(
    call: Callable[[], object],
    what: str,
    tally: Tally,
    error: type[IsobitError] = ArgumentError,
) -> None:
    """Count one comparison: the call must raise `error`, with a remedy in its message."""
    tally.compared += 1
    try:
        call()
    except error as raised:
        if "remedy" not in str(raised):
            tally.fail(f"{what}: refused without a remedy")
    except Exception as other:
        tally.fail(f"{what}: {type(other).__name__} instead of {error.__name__}")
    else:
        tally.fail(f"{what}: accepted")


def refuses_each(function: Callable[..., object], calls: Iterable[Call], tally: Tally) -> None:
    """Count each call as a case: it must raise an ArgumentError with a remedy."""
    for what, given, named in calls:
        tally.count(1)
        must_raise(partial(function, *given, **named), what, tally)


@contextmanager
def replaced(home: Any, name: str, wrong: Any) -> Iterator[None]:
    """Replace one attribute of a module while the block runs."""
    right = getattr(home, name)
    setattr(home, name, wrong)
    try:
        yield
    finally:
        setattr(home, name, right)
