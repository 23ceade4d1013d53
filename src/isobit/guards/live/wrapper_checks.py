"""Checks of what wraps a model: DistributedDataParallel, and the attributes that a wrapper overwrites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isobit.guards.live.events import Event
from isobit.guards.live.optimizer_checks import name_some


def check_reduced(model: nn.Module) -> Iterator[str]:
    """Yield a sentence if DistributedDataParallel does not reduce the gradients of parameters that the model has now.

    Args:
        model: Any model; only DistributedDataParallel is judged.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    reduced = {id(p) for p in model._module_parameters} | {
        id(p) for n, p in model.module.named_parameters() if n in model.parameters_to_ignore
    }
    trainable = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad]
    strange = [name for name, p in trainable if id(p) not in reduced]
    if strange:
        yield (
            f"{len(strange)} of {len(trainable)} trainable parameters were replaced after the model was wrapped, so "
            f"their gradients are not reduced over ranks: {name_some(strange)}"
        )


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[list[Event]]:
    """Report attributes of modules that a block of code overwrites, such as a wrapper that sets `module.id`.

    Attributes that did not exist before, names that start with an underscore, tensors, modules and `training` are not
    compared.

    Args:
        model: The model.

    Returns:
        A context manager. It gives a list, which has the findings `attribute-overwritten` after the block.

    Example:
        >>> from isobit.guards import same_attributes
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> model[0].id = "encoder"
        >>> with same_attributes(model) as found:
        ...     model[0].id = 0
        >>> print(*found)
        rank 0: attribute-overwritten: 0: id was 'encoder' and is 0
    """
    before = {name: (module, plain_attributes(module)) for name, module in model.named_modules()}
    found: list[Event] = []
    yield found
    for name, (module, kept) in before.items():
        now = vars(module)
        for key, value in kept.items():
            if key in now and (now[key] is value or now[key] == value):
                continue
            after = f"is {now[key]!r}" if key in now else "is gone"
            text = f"{key} was {value!r} and {after}"
            found.append(
                Event(
                    "finding", "attribute-overwritten", severity="error", module=name, message=text
                )
            )


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, strings or None."""
    return {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_")
        and key != "training"
        and isinstance(value, bool | int | float | str | type(None))
    }
