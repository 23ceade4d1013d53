"""Use isobit's statistics in the tools of others, which are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.calibration.factors import inverse_factor
from isobit.calibration.statistics import Hessian
from isobit.errors import UnsupportedError
from isobit.ops.linear.op import linear

GPTQ = "llmcompressor.modifiers.gptq"


@contextmanager
def gptq_statistics() -> Iterator[None]:
    """Give llm-compressor's GPTQModifier Hessians and factors whose bits do not depend on batch and threads.

    Inside, its `accumulate_hessian` adds samples one by one by isobit's tree, `factorize_hessian` is `inverse_factor`,
    and linear layers compute by `isobit.linear`. Other operators of the model are its own.

    Returns:
        A context manager; what was replaced is put back when it ends.

    Raises:
        UnsupportedError: If llm-compressor is not installed, or has other functions than version 0.14.

    Example:
        >>> with isobit.calibration.gptq_statistics():  # doctest: +SKIP
        ...     oneshot(model=model, dataset=dataset, recipe=[GPTQModifier(scheme="W4A16")])
    """
    try:
        base = import_module(f"{GPTQ}.base")
        quantize = import_module(f"{GPTQ}.gptq_quantize")
        owners = [(base, "accumulate_hessian"), (quantize, "factorize_hessian")]
        before: list[tuple[Any, str, Any]] = [
            (owner, name, getattr(owner, name)) for owner, name in owners
        ]
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            expected="llm-compressor 0.14: GPTQ's accumulate_hessian and factorize_hessian",
            received=str(error),
            remedy="pip install llmcompressor==0.14.0.1",
        ) from None
    kept: dict[int, tuple[Tensor, Hessian]] = {}

    def accumulate(inp: Tensor, module: torch.nn.Module, h: Any, samples: Any) -> Any:
        return add_samples(kept, inp, module, h, samples)

    def forward(self: torch.nn.Linear, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    before.append((torch.nn.Linear, "forward", torch.nn.Linear.forward))
    for (owner, name, _), function in zip(before, (accumulate, factorize, forward), strict=True):
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def add_samples(
    kept: dict[int, tuple[Tensor, Hessian]],
    inp: Tensor,
    module: torch.nn.Module,
    h: Tensor,
    samples: Any,
) -> tuple[Tensor, Any]:
    """Add a batch to the statistics of a linear layer; `h` is replaced by the sum so far."""
    if not isinstance(module, torch.nn.Linear):
        raise UnsupportedError(
            expected="linear layers",
            received=type(module).__name__,
            remedy="leave other modules out of the targets",
        )
    batch = inp if inp.ndim == 3 else inp.reshape(1, *inp.shape[-2:])
    if not int(samples):
        kept[id(module)] = (h, Hessian(h.shape[-1]))
    statistics = kept[id(module)][1]
    statistics.add(batch.float())
    h.copy_(2 * statistics.total())  # divided by the number of samples later
    return h, samples + len(batch)


def factorize(weights: Tensor, hessians: Tensor, percdamp: float, fallback: Tensor) -> Tensor:
    """Return GPTQ's factors of a batch of Hessians, as llm-compressor's function of this name."""
    found = []
    for i, h in enumerate(hessians):
        dead = h.diagonal() == 0
        h = h + torch.diag_embed(dead.to(h.dtype))
        weights[i][:, dead] = 0
        diagonal = h.diagonal().double()
        # The mean in sequence: a library's sum may depend on threads.
        mean = float(sum(diagonal.tolist())) / len(diagonal)
        try:
            found.append(
                inverse_factor(
                    h.double() + percdamp * mean * torch.eye(len(h), dtype=torch.float64)
                )
            )
        except ValueError:
            fallback[i] = True
            found.append(torch.eye(len(h), dtype=torch.float64))
    return torch.stack(found).to(hessians.dtype)
