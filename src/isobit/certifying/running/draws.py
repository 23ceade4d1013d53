"""Random numbers of a function that is watched: an element has one value, whatever the size of the tensor.

[Note: what is drawn]
Two calls with different row counts draw tensors of different sizes, and torch's generators then give a row another
value in each. So the numbers are drawn here: each from the state of the generator and the index of the element. The
generator goes on by as much whatever is drawn. Then inputs that are the same by their names must hold the same values,
which the judge compares. So must memory that nobody has initialised: it gets one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from isobit.certifying.names.hashes import hash_parts


def redraw(call: Callable[[], Any], name: str, given: Mapping[str, Any]) -> Any:
    """Call an operator that draws numbers, then put others in their place; the operator's arguments are given by name.

    Numbers of a distribution that is not known here stay as torch drew them.
    """
    generator = given.get("generator") or torch.default_generator
    state = generator.get_state()
    found = call()
    drawn = numbers(name, given, found, state) if isinstance(found, torch.Tensor) else None
    if drawn is not None:
        found.copy_(drawn)
    generator.set_state(state)
    pass_by(generator)
    return found


def pass_by(generator: torch.Generator | None) -> None:
    """Let a generator go on by one number."""
    torch.rand((), generator=generator)


def numbers(
    name: str, given: Mapping[str, Any], found: torch.Tensor, state: torch.Tensor
) -> torch.Tensor | None:
    """Return what an operator draws, with the shape of what it returned, or None for other operators."""
    kind = name.removeprefix("aten::").removesuffix("_like").removesuffix("_")
    raw = hashes(tuple(found.shape), state)
    if kind in ("randint", "random"):
        low = given.get("low", given.get("from")) or 0
        high = given.get("high", given.get("to"))
        if high is None:
            bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 53}
            bits |= {torch.bool: 1}
            high = 1 << bits.get(found.dtype, 8 * found.element_size() - 1)
        return torch.from_numpy((raw >> np.uint64(1)).astype(np.int64) % (high - low) + low)
    # 53 bits between 0 and 1, both left out
    part = torch.from_numpy(((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)
    drawn: torch.Tensor | None = None
    if kind in ("rand", "uniform"):
        low, high = given.get("from", 0.0), given.get("to", 1.0)
        drawn = low + part * (high - low)
    elif kind in ("randn", "normal"):
        drawn = torch.special.ndtri(part) * given.get("std", 1.0) + given.get("mean", 0.0)
    elif kind == "bernoulli":
        chance = given.get("p")
        drawn = (part < (given["self"] if chance is None else chance)).double()
    elif kind == "exponential":
        drawn = -torch.log(part) / given.get("lambd", 1.0)
    return drawn


def hashes(shape: tuple[int, ...], state: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return 64 random bits per element, which depend on a generator's state and the element's index alone."""
    start = np.uint64(int.from_bytes(blake3(state.numpy().tobytes()).digest()[:8], "little"))
    indices = [
        np.arange(length, dtype=np.uint64).reshape(
            [-1 if at == axis else 1 for at in range(len(shape))]
        )
        for axis, length in enumerate(shape)
    ]
    found = hash_parts(start, tuple(indices) or (np.uint64(0),))
    return np.broadcast_to(np.asarray(found), shape)
