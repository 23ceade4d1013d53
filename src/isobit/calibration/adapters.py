"""Use isobit's statistics in the tools of others, which are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.calibration.statistics import ColumnNorms, Hessian, inverse_factor
from isobit.errors import UnsupportedError
from isobit.ops.linear.op import linear

GPTQ = "llmcompressor.modifiers.gptq"
SPARSEGPT = "llmcompressor.modifiers.pruning.sparsegpt.base"
COMPRESSOR, COMPRESSOR_REMEDY = "llm-compressor 0.14", "pip install llmcompressor==0.14.0.1"
Functions = Mapping[str, Callable[..., Any]]  # by `module:name` of what they replace
Statistics = dict[int, tuple[Tensor, Hessian]]  # by id of a layer; the tensor is the tool's


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
    kept: Statistics = {}
    functions: Functions = {
        f"{GPTQ}.base:accumulate_hessian": partial(add_samples, kept, Hessian.total, 2.0),
        f"{GPTQ}.gptq_quantize:factorize_hessian": factorize,
    }
    with replaced(functions, COMPRESSOR, COMPRESSOR_REMEDY):
        yield


@contextmanager
def sparsegpt_statistics() -> Iterator[None]:
    """Give llm-compressor's SparseGPTModifier sums whose bits do not depend on batch and threads.

    Inside, its `accumulate_hessian` adds samples one by one by isobit's tree, its `sparsify_weight` is `sparsify`, and
    linear layers compute by `isobit.linear`. Other operators of the model are its own.

    Returns:
        A context manager; what was replaced is put back when it ends.

    Raises:
        UnsupportedError: If llm-compressor is not installed, or has other functions than version 0.14.

    Example:
        >>> with isobit.calibration.sparsegpt_statistics():  # doctest: +SKIP
        ...     oneshot(model=model, dataset=dataset, recipe=[SparseGPTModifier(sparsity=0.5)])
    """
    kept: Statistics = {}
    functions: Functions = {
        f"{SPARSEGPT}:accumulate_hessian": partial(add_samples, kept, Hessian.value, 1.0),
        f"{SPARSEGPT}:sparsify_weight": sparsify,
    }
    with replaced(functions, COMPRESSOR, COMPRESSOR_REMEDY):
        yield


@contextmanager
def wanda_statistics() -> Iterator[None]:
    """Give torchao's WandaSparsifier norms whose bits do not depend on batch, threads or the order of samples.

    Inside, its observer adds squares exactly and rounds their sum once, to fp32, and linear layers compute by
    `isobit.linear`. Run the calibration and `step()` inside.

    Returns:
        A context manager; what was replaced is put back when it ends.

    Raises:
        UnsupportedError: If torchao is not installed, or has another observer than version 0.18.

    Example:
        >>> with isobit.calibration.wanda_statistics():  # doctest: +SKIP
        ...     sparsifier.prepare(model, config=None)
        ...     model(batch)
        ...     sparsifier.step()
    """
    kept: dict[int, tuple[Any, ColumnNorms]] = {}

    def observe(observer: Any, x: Tensor) -> Tensor:
        return add_squares(kept, observer, x)

    functions = {"torchao.sparsity.utils:PerChannelNormObserver.forward": observe}
    with replaced(functions, "torchao 0.18", "pip install torchao==0.18.0"):
        yield


@contextmanager
def replaced(functions: Functions, tool: str, remedy: str) -> Iterator[None]:
    """Replace functions, named as `module:name`, and the forward of linear layers, until the context ends."""
    before: list[tuple[Any, str, Any, Callable[..., Any]]] = []
    for place, function in functions.items():
        module, _, path = place.partition(":")
        *parts, name = path.split(".")
        try:
            owner = import_module(module)
            for part in parts:
                owner = getattr(owner, part)
            before.append((owner, name, getattr(owner, name), function))
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                expected=f"{tool}, which has {place}", received=str(error), remedy=remedy
            ) from None

    def forward(self: torch.nn.Linear, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    before.append((torch.nn.Linear, "forward", torch.nn.Linear.forward, forward))
    for owner, name, _, function in before:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function, _ in before:
            setattr(owner, name, function)


def require_linear(module: torch.nn.Module) -> None:
    """Raise for layers whose inputs are not the columns of their weight."""
    if not isinstance(module, torch.nn.Linear):
        raise UnsupportedError(
            expected="linear layers",
            received=type(module).__name__,
            remedy="leave other modules out of the targets",
        )


def add_samples(
    kept: Statistics,
    read: Callable[[Hessian], Tensor],
    factor: float,
    inp: Tensor,
    module: torch.nn.Module,
    h: Tensor,
    samples: Any,
) -> tuple[Tensor, Any]:
    """Add a batch to the statistics of a linear layer; `h` is replaced by `factor` times what is read of them."""
    require_linear(module)
    batch = inp if inp.ndim == 3 else inp.reshape(1, *inp.shape[-2:])
    if not int(samples):
        kept[id(module)] = (h, Hessian(h.shape[-1]))
    statistics = kept[id(module)][1]
    statistics.add(batch.float())
    h.copy_(factor * read(statistics))
    return h, samples + len(batch)


def add_squares(kept: dict[int, tuple[Any, ColumnNorms]], observer: Any, x: Tensor) -> Tensor:
    """Add activations to the squares of an observer of torchao, and return them as they are."""
    if not x.numel():
        return x
    if id(observer) not in kept or not observer.norm.numel():
        kept[id(observer)] = (observer, ColumnNorms(x.shape[-1]))
    statistics = kept[id(observer)][1]
    statistics.add(x)
    squares = torch.tensor([float(one) for one in statistics.squares()])
    squares[statistics.broken] = torch.nan
    observer.norm.resize_(squares.shape)
    observer.norm.copy_(squares)
    return x


def factorize(weights: Tensor, hessians: Tensor, percdamp: float, fallback: Tensor) -> Tensor:
    """Return GPTQ's factors of a batch of Hessians, as llm-compressor's function of this name."""
    found = []
    for i, h in enumerate(hessians):
        factor = damped_factor(weights[i], h, percdamp)
        if factor is None:
            fallback[i] = True
            factor = torch.eye(len(h), dtype=torch.float64)
        found.append(factor)
    return torch.stack(found).to(hessians.dtype)


def damped_factor(weight: Tensor, hessian: Tensor, dampening: float) -> Tensor | None:
    """Return `inverse_factor` of a Hessian with dampening, in fp64; none if it is not positive definite.

    Columns that are always zero get a one on the diagonal, and their weights become zero.
    """
    dead = hessian.diagonal() == 0
    h = hessian + torch.diag_embed(dead.to(hessian.dtype))
    weight[:, dead] = 0
    diagonal = h.diagonal().double()
    # The mean in sequence: a library's sum may depend on threads.
    mean = float(sum(diagonal.tolist())) / len(diagonal)
    try:
        return inverse_factor(h.double() + dampening * mean * torch.eye(len(h)).double())
    except ValueError:
        return None


def sparsify(
    module: torch.nn.Module,
    hessians_dict: dict[torch.nn.Module, Tensor],
    sparsity: float,
    prune_n: int,
    prune_m: int,
    block_size: int,
    dampening_frac: float,
    preserve_sparsity_mask: bool,
) -> tuple[float, Tensor]:
    """Prune a linear layer as llm-compressor's `sparsify_weight` of SparseGPT; return the loss and the weight.

    As there, weights up to the threshold go, the threshold itself and its equals too.
    """
    require_linear(module)
    if preserve_sparsity_mask:
        raise UnsupportedError(
            expected="preserve_sparsity_mask=False",
            received="True",
            remedy="prune the dense model, or use SparseGPT without isobit's statistics",
        )
    given: Any = module.weight
    weight = given.detach().float().clone()
    found = damped_factor(weight, hessians_dict.pop(module), dampening_frac)
    columns = weight.shape[1]
    factor = torch.eye(columns) if found is None else found.float()
    losses = []
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        diagonal = factor.diagonal()[start:stop]
        score = (weight[:, start:stop] / diagonal).square()
        # Nothing is dropped yet in N:M, where each group is decided when its turn comes.
        edge = score.flatten().sort().values[int(score.numel() * sparsity)]
        dropped = score <= edge if not prune_n else torch.zeros_like(score, dtype=torch.bool)
        errors = torch.zeros_like(score)
        for at in range(start, stop):
            if prune_n and (at - start) % prune_m == 0:
                group = slice(at, min(at + prune_m, stop))
                size = (weight[:, group] / factor.diagonal()[group]).square()
                least = size.sort(dim=1, stable=True).indices[:, :prune_n]
                dropped[:, at - start : group.stop - start].scatter_(1, least, True)
            gone = torch.where(dropped[:, at - start], weight[:, at], 0.0)
            error = gone / factor[at, at]
            weight[:, at + 1 : stop] -= error[:, None] * factor[at, at + 1 : stop]
            weight[:, at] -= gone
            errors[:, at - start] = error
        losses += (errors.square() / 2).flatten().tolist()
        if stop < columns:
            weight[:, stop:] -= linear(errors, factor[start:stop, stop:].T.contiguous())
    return float(sum(losses)), weight.to(given.dtype)
