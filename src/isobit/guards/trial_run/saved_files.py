"""Read back what a program saves, and compare it with the model in memory, bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isobit import bits
from isobit.errors import ArgumentError
from isobit.foundation.plain_text import one_line
from isobit.guards.live.module_replay import tensors_in, unwrapped
from isobit.guards.live.optimizer_checks import name_some
from isobit.guards.trial_run.report import Found, NotJudged, PreflightFinding

# Which tensors have bits that can be read in this process.


def can_digest(tensor: Tensor) -> bool:
    """Return whether a tensor has bits to read here: a wrapper, as DTensor is, has no memory of its own."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not is_traceable_wrapper_subclass(tensor)
    )


def readable_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value that have bits to read; results of collectives are waited for."""
    for tensor in tensors_in(value):
        plain = tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            plain = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        if can_digest(plain):
            yield plain


PREFIXES = ("module.", "_orig_mod.", "model.")
DEPTH = 3  # of dictionaries in a file


class SavedFiles:
    """Files of a program, read back as soon as they are written, while `recording` is open.

    Args:
        is_mine: Whether the current thread is the program's.
        models: Returns the models of the program.
    """

    def __init__(self, is_mine: Callable[[], bool], models: Callable[[], list[nn.Module]]) -> None:
        self.is_mine, self.models = is_mine, models
        self.found: list[Found] = []
        self.reasons: list[str] = []
        self.compared = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace torch.save, and safetensors' save_file if it is installed, by ones that also read back."""
        with ExitStack() as stack:
            self.replace(stack, torch, "save")
            if importlib.util.find_spec("safetensors") is not None:
                import safetensors.torch

                self.replace(stack, safetensors.torch, "save_file")
            yield

    def replace(self, stack: ExitStack, owner: Any, name: str) -> None:
        """Replace one function for as long as the stack is open."""
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def save(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            where = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if self.is_mine() and isinstance(where, str | os.PathLike):
                self.note(Path(where))
            return result

        setattr(owner, name, save)
        stack.callback(setattr, owner, name, plain)

    def note(self, path: Path) -> None:
        """Read one file back."""
        for model in self.models():
            try:
                self.found += compare_with_live(read_tensors(path), model, path.name)
                self.compared += 1
            except NotJudged as reason:
                self.reasons.append(f"{path.name}: {reason}")

    def check(self) -> Iterator[Found]:
        """Yield what was found.

        Raises:
            NotJudged: If no file was compared.
        """
        if not self.compared:
            raise NotJudged(
                self.reasons[0]
                if self.reasons
                else "nothing was saved in these steps; isobit.guards.check_checkpoint compares a file with a model"
            )
        yield from dict.fromkeys(self.found)


def read_tensors(path: Path) -> dict[str, Any]:
    """Read a file of torch.save or safetensors. Nothing in it is executed.

    Raises:
        NotJudged: If it holds other objects than tensors and plain values.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = one_line(str(error)).split(". ")[0][:120]
        raise NotJudged(
            f"it could not be read back safely: {type(error).__name__}: {reason}"
        ) from error
    return held if isinstance(held, dict) else {"": held}


def states_in(held: Mapping[Any, Any], depth: int = DEPTH) -> Iterator[dict[str, Tensor]]:
    """Yield the dictionaries of tensors in a file, with names without the prefixes of wrappers."""
    tensors = {
        plain_name(k): v
        for k, v in held.items()
        if isinstance(k, str) and isinstance(v, Tensor) and can_digest(v)
    }
    if tensors:
        yield tensors
    for value in held.values():
        if depth and isinstance(value, Mapping):
            yield from states_in(value, depth - 1)


def plain_name(name: str) -> str:
    """Return a name without the prefixes of DistributedDataParallel, torch.compile and trainers."""
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def compare_with_live(held: Mapping[Any, Any], model: nn.Module, file: str) -> list[Found]:
    """Compare the tensors of a file with those of a model.

    Raises:
        NotJudged: If the file has another model, or one whose trained parameters all differ, such as an average.
    """
    state = unwrapped(model).state_dict()
    live = {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}
    if not all(map(can_digest, live.values())):
        raise NotJudged("the model is sharded, or has tensors without memory")
    trained = {plain_name(n) for n, p in unwrapped(model).named_parameters() if p.requires_grad}
    states = [found for found in states_in(held) if len(live.keys() & found.keys()) > 0]
    if not states:
        raise NotJudged("it has no tensor with a name of the model")
    saved = max(states, key=lambda found: len(live.keys() & found.keys()))
    common = live.keys() & saved.keys()
    wrong = sorted(name for name in common if not same_bits(saved[name], live[name]))
    if trained & common and trained & common <= set(wrong) and len(trained & common) > 1:
        raise NotJudged("every trained parameter differs from the model's: it may be an average")
    places = {live[name].data_ptr() for name in common}
    missing = sorted(n for n in live.keys() - common if live[n].data_ptr() not in places)
    found: list[Found] = []
    if wrong:
        message = f"{file}: {len(wrong)} of {len(common)} tensors read back differ from the model's: {name_some(wrong)}"
        found.append(("checkpoint-differs", "error", message))
    if missing:
        size = sum(live[name].numel() for name in missing)
        if not set(missing) & trained and 2 * size > sum(t.numel() for t in live.values()):
            if wrong:
                return found
            raise NotJudged("it has the trained parameters only, as adapters are saved")
        message = f"{file}: {len(missing)} of {len(live)} tensors of the model are missing: {name_some(missing)}"
        found.append(("checkpoint-incomplete", "error", message))
    return found


def same_bits(saved: Tensor, live: Tensor) -> bool:
    """Return whether a saved tensor has the bits of a live one, rounded to its dtype."""
    here = live.detach().cpu()
    return saved.shape == here.shape and bits.digest(saved) == bits.digest(here.to(saved.dtype))


def check_checkpoint(model: nn.Module, path: str | Path) -> tuple[PreflightFinding, ...]:
    """Read a checkpoint back and compare it with the model in memory, bit for bit.

    Args:
        model: The model that was saved. DistributedDataParallel is unwrapped.
        path: A file of `torch.save` or safetensors. It is read without executing anything in it.

    Returns:
        The findings: tensors that differ, tensors that are missing.

    Raises:
        ArgumentError: If the file cannot be compared with the model.

    Example:
        >>> import pathlib, tempfile
        >>> from isobit.guards import check_checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.pt"
        >>> torch.save(model.state_dict(), path)
        >>> check_checkpoint(model, path)
        ()
        >>> torch.save({"weight": model.weight}, path)
        >>> check_checkpoint(model, path)[0].message
        'model.pt: 1 of 2 tensors of the model are missing: bias'
    """
    try:
        found = compare_with_live(read_tensors(Path(path)), model, Path(path).name)
    except NotJudged as reason:
        raise ArgumentError(
            expected="a checkpoint of this model",
            received=f"{path}: {reason}",
            remedy="save model.state_dict() with torch.save or safetensors, and pass that file",
        ) from reason
    return tuple(PreflightFinding(*each) for each in found)
