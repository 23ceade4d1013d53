"""Transforms that must not change a row's result: batch size, position, neighbours, storage, threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.foundation.machine import thread_count

Arguments = dict[str, Tensor]
Run = Callable[[Arguments], Tensor]
Transform = Callable[[Run, Case, Arguments, Tensor, Tally], None]

# Around every tile edge in use; a mixture of them cuts a batch into batches.
PIECES = (1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 128, 129, 200, 257)
CHUNKS = (7, 100)
THREADS = (1, 2)


def changed_rows(case: Case, arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Apply a change to every argument that has rows."""
    return {name: change(t) if name in case.row_names else t for name, t in arguments.items()}


def batch(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Compute rows alone, and in batches of many sizes."""
    at, step = 0, case.recipe.seed
    while at < case.rows:
        size = min(PIECES[step % len(PIECES)], case.rows - at)
        compare_piece(run, case, arguments, whole, tally, at, size)
        at, step = at + size, step + 1
    for place in {0, case.rows // 2, case.rows - 1} if case.rows else ():
        compare_piece(run, case, arguments, whole, tally, place, 1)


def compare_piece(
    run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally, start: int, size: int
) -> None:
    """Compute consecutive rows by themselves."""
    part = run(changed_rows(case, arguments, lambda t: t[start : start + size].clone()))
    tally.same(
        part,
        whole[start : start + size],
        f"rows {start} to {start + size} of {case.rows} by themselves",
    )


def chunking(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Compute chunks of 7 and of 100 rows, alternating, as views of the batch."""
    chunks: list[Tensor] = []
    at = 0
    while at < case.rows:
        chunk = slice(at, at + CHUNKS[len(chunks) % len(CHUNKS)])
        chunks.append(run(changed_rows(case, arguments, lambda t, chunk=chunk: t[chunk])))  # type: ignore[misc]
        at = chunk.stop
    if chunks:
        tally.same(torch.cat(chunks), whole, f"in chunks of {' and '.join(map(str, CHUNKS))}")


def position(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Compute the rows in another order."""
    orders = {
        "reversed": torch.arange(case.rows - 1, -1, -1),
        "shuffled": torch.randperm(case.rows, generator=case.generator(31)),
    }
    for name, order in orders.items():
        moved = run(changed_rows(case, arguments, lambda t, order=order: t[order]))  # type: ignore[misc]
        tally.same(moved, whole[order], f"rows {name}")


def neighbours(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Replace all rows except (a) every second, (b) a random 30 %, (c) one; kept rows must not change."""
    at, drawn = torch.arange(case.rows), torch.rand(case.rows, generator=case.generator(35))
    keeps = {
        "even": at % 2 == 0,
        "odd": at % 2 == 1,
        "some": drawn < 0.3,
        "one": at == case.rows // 2,
    }
    for name, kept in keeps.items():

        def replaced(t: Tensor, kept: Tensor = kept) -> Tensor:
            other = case.draw(tuple(t.shape), 32, "wide")
            return torch.where(kept.reshape(-1, *[1] * (t.dim() - 1)), t, other)

        found = run(changed_rows(case, arguments, replaced))
        tally.same(found[kept], whole[kept], f"{name} of {case.rows} rows, the others replaced")


def padding(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Add rows of padding before and after."""
    for before, after in ((3, 0), (0, 5)):

        def padded(t: Tensor, before: int = before, after: int = after) -> Tensor:
            room = case.draw((before + after, *t.shape[1:]), 33, "wide")
            return torch.cat([room[:before], t, room[before:]])

        found = run(changed_rows(case, arguments, padded))
        tally.same(
            found[before : before + case.rows],
            whole,
            f"padded by {before} before and {after} after",
        )


def packing(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Compute the rows as one packed sequence, [1, rows, …], and as many samples of one, [rows, 1, …]."""
    for axis in (0, 1):
        found = run(changed_rows(case, arguments, lambda t, axis=axis: t.unsqueeze(axis)))  # type: ignore[misc]
        tally.same(found, whole.unsqueeze(axis), f"packed with an axis at {axis}")


def cache(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Call again, then with other values written into the same memory."""
    kept = {name: t.clone() for name, t in arguments.items()}
    run(kept)
    tally.same(run(kept), whole, "called again")
    for name in kept:
        kept[name].copy_(case.draw(tuple(kept[name].shape), 34, "wide"))
        tally.same(
            run(kept), run({k: t.clone() for k, t in kept.items()}), f"after a write to {name}"
        )


def layout(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Store the same values in other memory layouts."""
    for name, store in LAYOUTS.items():
        stored = {k: store(t) if t.dim() else t for k, t in arguments.items()}
        tally.same(run(stored), whole, f"stored {name}")
        for alone in arguments if len(arguments) > 1 else ():
            tally.same(run({**arguments, alone: stored[alone]}), whole, f"{alone} stored {name}")


def threads(run: Run, case: Case, arguments: Arguments, whole: Tensor, tally: Tally) -> None:
    """Compute with one thread and with two."""
    for count in THREADS:
        with thread_count(count):
            tally.same(run(arguments), whole, f"{count} threads")


def transposed(tensor: Tensor) -> Tensor:
    """Store the values column by column."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def strided(tensor: Tensor) -> Tensor:
    """Store the values with a stride of three."""
    wide = tensor.new_zeros(*tensor.shape, 3)
    wide[..., 1] = tensor
    return wide[..., 1]


def misaligned(tensor: Tensor) -> Tensor:
    """Store the values contiguously, one element off any alignment."""
    room = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    room.copy_(tensor)
    return room


def padded_rows(tensor: Tensor) -> Tensor:
    """Store the values with an odd gap after each row."""
    size = tensor.shape[-1]
    wide = tensor.new_zeros(*tensor.shape[:-1], size + 7)
    wide[..., :size] = tensor
    return wide[..., :size]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "strided": strided,
    "misaligned": misaligned,
    "with gaps between rows": padded_rows,
}
TRANSFORMS: dict[str, Transform] = {
    f.__name__: f
    for f in (batch, position, neighbours, padding, chunking, packing, cache, layout, threads)
}
