"""Watch what leaves torch while a function runs: values that Python reads, and memory that numpy can change.

[Note: memory that numpy sees]
`Tensor.numpy()` passes no operator of torch, so a dispatch mode does not see it, and what numpy writes later is not
seen at all. A storage that was given to numpy is therefore named as one that is made outside torch in every call: by
the argument that it is passed as, and its content is compared between row counts. It is never taken for scratch memory.
Torch may copy it element by element before the launch; a kernel may not write it, and it may not change between two
launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from isobit.certifying.running.watch import HostRead, Made, Watch, digest, held_by, storage_of
from isobit.errors import UnsupportedError

FunctionMode: Any = TorchFunctionMode  # untyped in torch

NUMPY = "Tensor.numpy"
GIVES = {  # what gives a tensor's memory away
    torch.Tensor.numpy: NUMPY,
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
}
READS = {  # what only reads its values
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.allclose: "torch.allclose",
    torch.allclose: "torch.allclose",
    torch.Tensor.__reduce_ex__: "a pickle",
}
# These read the numbers of their second argument, as a size.
SPLITS = {
    torch.tensor_split: "torch.tensor_split",
    torch.Tensor.tensor_split: "torch.tensor_split",
}


class Exposed(FunctionMode):  # type: ignore[misc]
    """Notes in a Watch which values go to Python, and which memory goes to numpy."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.given = {s for s, made in watch.known.kept.items() if made.operator == NUMPY}
        for storage in self.given:  # an earlier call gave it to numpy, which may still change it
            made = watch.known.kept[storage]
            watch.made[storage] = exposed(watch, made.recipe, made.shape, made.floats, ())

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note what leaves torch by it."""
        kwargs = kwargs or {}
        # While isobit works on a launch, the dispatch mode is off.
        if torch._C._len_torch_dispatch_stack():
            for name, tensor in read_by(func, args, kwargs):
                self.note(name, tensor, gives=func in GIVES)
        return func(*args, **kwargs)

    def note(self, name: str, tensor: torch.Tensor, gives: bool) -> None:
        """Note that a tensor's values were read; if its memory was given away, also that it may change."""
        storage, watch = storage_of(tensor), self.watch
        watch.check(name, [tensor], [])
        made = watch.made.get(storage)
        if made is None or not is_scratch(watch, storage, made):
            watch.host_reads.append(HostRead(watch.origin(tensor).key, name, held_by(tensor)))
        if gives and (made is None or made.operator != NUMPY):
            self.given.add(storage)
            whose = watch.known.outside.get(storage, "outside") if made is None else made.recipe
            floats = tensor.dtype.is_floating_point if made is None else made.floats
            shape = tuple(tensor.shape) if made is None else made.shape
            parents = () if made is None else (made.key,)
            watch.alive.append(tensor.untyped_storage())
            watch.made[storage] = exposed(watch, digest(NUMPY, whose), shape, floats, parents)

    def __exit__(self, *error: Any) -> None:
        """Note what torch wrote to memory where numpy can read it."""
        super().__exit__(*error)
        made = [self.watch.made[storage] for storage in self.given]
        self.watch.host_reads += [
            HostRead(one.key, NUMPY, "") for one in made if one.operator != NUMPY
        ]


def exposed(
    watch: Watch, recipe: str, shape: tuple[int, ...], floats: bool, parents: tuple[str, ...]
) -> Made:
    """Make the entry of a storage that numpy can change, and keep it in the history."""
    key = watch.numbered("numpy", NUMPY, recipe)
    made = Made(key, NUMPY, parents, shape, recipe, recipe, NUMPY, floats=floats)
    watch.history[key] = made
    return made


def is_scratch(watch: Watch, storage: int, made: Made) -> bool:
    """Tell whether nothing has written a storage since torch made it."""
    return made.key.startswith("scratch") and storage not in watch.filled


def read_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors whose values a function of torch hands out, and what to call it."""
    try:
        name = GIVES.get(func) or READS.get(func)
        splits = SPLITS.get(func)
    except TypeError:  # it cannot be looked up, so it is none of them
        return
    if name is not None:
        yield from ((name, each) for each in args if isinstance(each, torch.Tensor))
    if splits is not None:
        by = [*args[1:2], *kwargs.values()]
        yield from ((splits, each) for each in by if isinstance(each, torch.Tensor))


def is_exposed(watch: Watch, storage: int) -> bool:
    """Tell whether numpy could change a storage, or what torch made it of."""
    return any(made.operator == NUMPY for made in origins(watch, storage))


def origins(watch: Watch, storage: int) -> list[Made]:
    """Return how a storage was made, and what it was made of up to memory that numpy can change."""
    made = watch.made.get(storage)
    seen, work = dict[str, Made](), [] if made is None else [made]
    while work:
        one = work.pop()
        if one.key not in seen:
            seen[one.key] = one
            parents = () if one.operator == NUMPY else one.parents
            work += [watch.history[key] for key in parents if key in watch.history]
    return list(seen.values())


def key_of(watch: Watch, tensor: torch.Tensor, argument: str) -> str:
    """Return the key of a tensor's storage. See [Note: memory that numpy sees]."""
    storage = storage_of(tensor)
    if storage not in watch.fresh:
        if not is_exposed(watch, storage):
            return watch.key_of(tensor, argument)
        same = sum(key.startswith(f"fresh {argument} ") for key in watch.fresh.values())
        watch.fresh[storage] = f"fresh {argument} {same}"
    return watch.fresh[storage]


def check_copies(watch: Watch, tensor: torch.Tensor, argument: str) -> None:
    """Raise an error if torch computed a tensor from memory that numpy can change, other than by elements."""
    wrong = [
        made
        for made in origins(watch, storage_of(tensor))
        if made.parents and made.operator != NUMPY and not made.pointwise
    ]
    if wrong and is_exposed(watch, storage_of(tensor)):
        raise UnsupportedError(
            expected="torch to copy what numpy can change element by element",
            received=f"{argument} was computed by torch ({wrong[0].operator}) from a tensor that was given to numpy",
            remedy="pass the tensor itself, or fill it with torch instead of numpy",
        )


def check_unchanged(argument: str, before: bytes, now: bytes) -> None:
    """Raise an error if memory is not what it was after the launch before: something changed it unseen."""
    if before != now:
        raise UnsupportedError(
            expected="inputs that stay as they are between two launches",
            received=f"{argument} changed after a launch, by no operator of torch (numpy, another thread)",
            remedy="fill it before the first launch, or use a new tensor",
        )


def check_written(watch: Watch, storage: int, argument: str) -> None:
    """Raise an error if a kernel wrote memory that numpy can change unseen."""
    if is_exposed(watch, storage):
        raise UnsupportedError(
            expected="kernels to write memory that only torch and kernels can change",
            received=f"{argument} was given to numpy, and a kernel writes it",
            remedy="make it with torch, and leave out .numpy() before the launch",
        )
