"""Exact global-norm clipping, and AdamW with a step of its own, which has one definition on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from isobit.errors import ArgumentError, UnsupportedError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops.adamw import step as steps
from isobit.ops.adamw.portable import Numbers, numbers_of
from isobit.ops.device_tables import refuse_in_capture
from isobit.ops.exact_sum.op import exact_state_anywhere, round_state
from isobit.ops.gpu.executors import is_asked_for
from isobit.ops.share import refuse_unfinished

__all__ = ["AdamW", "clip_grad_norm_", "get_total_norm"]

MARGIN = 1e-6  # added to the norm before the division, as torch does


def __dir__() -> list[str]:
    return __all__


def get_total_norm(tensors: Tensor | Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all elements, which does not depend on how they are cut into tensors.

    It is the square root of the exact sum of squares. isobit.parallel.get_total_norm is the version for a model that is
    spread over ranks.

    Args:
        tensors: One or more tensors in fp32, bf16 or fp16.

    Returns:
        A scalar in fp32.

    Raises:
        ArgumentError: If a tensor is not supported.

    Example:
        >>> x = torch.randn(1000)
        >>> torch.equal(isobit.optim.get_total_norm(x), isobit.optim.get_total_norm(x.split(7)))
        True
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm = norm_of(exact_state_anywhere(given, squared=True))
    return norm.to(given[0].device) if given else norm


@keeping_subnormals
def norm_of(state: Tensor) -> Tensor:
    """Return the norm from the state of a sum of squares; add the states of several ranks first."""
    return round_state(state, torch.float64).sqrt().float()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_, but the norm is exact: it does not depend on how gradients are cut.

    Args:
        parameters: Parameters whose gradients are scaled by min(1, max_norm / (norm + 1e-6)).
        max_norm: The largest norm allowed.
        error_if_nonfinite: Whether to raise if the norm is NaN or infinite.

    Returns:
        The norm before scaling, a scalar in fp32.

    Raises:
        UnsupportedError: If the norm is not finite and error_if_nonfinite is set, or if the step's gradients are not
            complete yet.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> isobit.optim.clip_grad_norm_([p], max_norm=1.0)
        tensor(5.)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_unfinished("clip_grad_norm_", given)
    grads = [p.grad for p in given if p.grad is not None]
    norm = checked_norm(grads, error_if_nonfinite)
    scale_by_norm(grads, norm, max_norm)
    return norm


def checked_norm(grads: list[Tensor], error_if_nonfinite: bool) -> Tensor:
    """Return the norm of gradients; raise if it must be finite, and is not."""
    norm = get_total_norm(grads)
    if error_if_nonfinite and not norm.isfinite():
        raise UnsupportedError(
            expected="gradients of finite norm",
            received=f"a norm of {norm.item()}",
            remedy="find the gradient that is not finite, or pass error_if_nonfinite=False",
        )
    return norm


def scale_by_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place; each product is rounded once to its dtype."""
    scale = scale_of(norm.cpu(), max_norm)  # one number, computed on the host
    if scale != 1.0:  # a product with 1 changes nothing
        steps.scale_(list(grads), scale)


@keeping_subnormals
def scale_of(norm: Tensor, max_norm: float) -> float:
    """Return min(1, max_norm / (norm + 1e-6)), computed in fp32."""
    return float((max_norm / (norm + MARGIN)).clamp(max=1.0))


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with isobit's own step: each element's bits depend on that element alone.

    They depend neither on its place in memory, nor on how a parameter is cut or sharded, nor on threads, and a GPU's
    step has the bits of the CPU's. State dicts are those of torch.optim.AdamW. The results differ from torch's by
    roundings: torch's square roots on the CPU are not all correctly rounded, it fuses some operations, and in 16 bits
    it rounds after each operation. `foreach` is accepted and changes nothing. With `amsgrad`, `differentiable` or
    `capturable`, a step is torch's own on the CPU, and not supported on a GPU. A weight that is or was frozen
    (`isobit.freeze`) is stepped as any other. If a step raises, it is not counted.

    Raises:
        ArgumentError: If fused is True.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = isobit.optim.AdamW([p], lr=0.1)
        >>> p.sum().backward()
        >>> optimizer.step()
    """

    _factor = 1.0  # of the gradients; another number only during a call of clip_and_step

    def __init__(self, params: Any, *args: Any, fused: bool | None = None, **options: Any) -> None:
        refuse_fused(fused)
        super().__init__(params, *args, fused=None, **options)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        The step keeps subnormals whatever was passed to `torch.set_flush_denormal`; the closure runs under the caller's
        setting.

        Args:
            closure: Recomputes the loss, as for torch.optim.Optimizer.step.

        Returns:
            What the closure returned, or None.

        Raises:
            ArgumentError: If a loaded state dict has set fused, or has other shapes or dtypes than the parameters.
            UnsupportedError: If an option is not supported on a GPU, a gradient is sharded unlike its parameter, or a
                CUDA graph is being captured, which would repeat one number of the step.
        """
        for group in self.param_groups:
            refuse_fused(group["fused"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            refuse_without_kernel(group)
        refuse_in_capture("optim.AdamW.step, whose number of the step is on the host")
        with torch.no_grad():
            take_step(self, self._factor)
        return loss

    @torch.no_grad()
    def clip_and_step(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Take one step with gradients clipped to a global 2-norm, without a pass over memory that scales them.

        Parameters and moments have the bits that `clip_grad_norm_` of all parameters and then `step` give. The
        gradients are scaled as the step reads them, and are themselves not changed.

        Args:
            max_norm: The largest norm allowed.
            error_if_nonfinite: Whether to raise if the norm is NaN or infinite; nothing is changed then.

        Returns:
            The norm before scaling, a scalar in fp32.

        Raises:
            ArgumentError: As `step` does.
            UnsupportedError: If a parameter is distributed over ranks, an option has no kernel of isobit's own, the
                step's gradients are not complete yet, or the norm is not finite and error_if_nonfinite is set.

        Example:
            >>> p = torch.nn.Parameter(torch.zeros(2))
            >>> p.grad = torch.tensor([3.0, 4.0])
            >>> isobit.optim.AdamW([p]).clip_and_step(max_norm=1.0)
            tensor(5.)
        """
        given = [p for group in self.param_groups for p in group["params"]]
        refuse_unfinished("optim.AdamW.clip_and_step", given)
        for group in self.param_groups:
            refuse_fused(group["fused"])
            refuse_to_clip(group)
        norm = checked_norm([p.grad for p in given if p.grad is not None], error_if_nonfinite)
        self._factor = scale_of(norm.cpu(), max_norm)
        try:
            self.step()  # with its hooks, and what a scheduler has put around it
        finally:
            self._factor = 1.0
        return norm


def refuse_to_clip(group: dict[str, Any]) -> None:
    """Raise for groups whose gradients only `clip_grad_norm_` can scale."""
    option = option_without_kernel(group)
    distributed = any(hasattr(p, "placements") for p in group["params"])
    if option is not None or distributed:
        raise UnsupportedError(
            expected="parameters on one rank, without amsgrad, capturable and differentiable",
            received="parameters that are distributed over ranks"
            if distributed
            else f"{option}=True",
            remedy="call isobit.parallel.clip_grad_norm_ or isobit.optim.clip_grad_norm_, then step()",
        )


def take_step(optimizer: AdamW, factor: float) -> None:
    """Step all groups with gradients times a factor; nothing is changed before all of them are checked."""
    updates: list[steps.Update] = []
    counts: list[Tensor] = []
    by_torch = []
    for group in optimizer.param_groups:
        lists: tuple[list[Any], ...] = ([], [], [], [], [], [])
        has_complex = bool(optimizer._init_group(group, *lists))  # type: ignore[no-untyped-call]
        if option_without_kernel(group):
            by_torch.append((group, lists, has_complex))
            continue
        updates += updates_of(group, lists)
        counts += lists[-1]
    steps.adamw_(updates, factor)
    if counts:  # after the step, which counts nothing if it raises
        torch._foreach_add_(counts, 1)
    for given in by_torch:
        keeping_subnormals(step_by_torch)(*given)


def updates_of(group: dict[str, Any], lists: tuple[list[Any], ...]) -> Iterator[steps.Update]:
    """Yield the checked update of each parameter of a group."""
    lr, betas = float(group["lr"]), tuple(map(float, group["betas"]))
    known: dict[float, Numbers] = {}
    params, grads, firsts, seconds, _, counts = lists
    for p, grad, first, second, count in zip(params, grads, firsts, seconds, counts, strict=True):
        step = count.item() + 1
        if step not in known:
            rest = group["eps"], group["weight_decay"], step
            known[step] = numbers_of(lr, betas, *rest, maximize=group["maximize"])  # type: ignore[arg-type]
        own = [local_part(tensor, p) for tensor in (p, grad, first, second)]
        update = steps.Update(own[0], own[1], own[2], own[3], known[step])
        update.check()
        yield update


def local_part(tensor: Any, p: Any) -> Tensor:
    """Return this rank's part of a DTensor, the real and imaginary parts of complex numbers, else the tensor."""
    if hasattr(p, "placements"):
        if getattr(tensor, "placements", None) != p.placements:
            raise UnsupportedError(
                expected=f"gradients and moments with the parameter's placements, {p.placements}",
                received=str(getattr(tensor, "placements", "a tensor that is not distributed")),
                remedy="redistribute the gradient to the placements of its parameter",
            )
        tensor = tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def option_without_kernel(group: dict[str, Any]) -> str | None:
    """Return the first option of a group that isobit's own step does not have."""
    return next((o for o in ("amsgrad", "capturable", "differentiable") if group[o]), None)


def refuse_without_kernel(group: dict[str, Any]) -> None:
    """Raise for options that isobit's own step does not have, where only it can serve."""
    option = option_without_kernel(group)
    if option is not None and is_asked_for(tuple(group["params"])):
        raise UnsupportedError(
            expected=f"AdamW without {option} for parameters on a GPU",
            received=f"{option}=True",
            remedy=f"leave {option} out, or keep the parameters on the CPU",
        )


def step_by_torch(group: dict[str, Any], lists: tuple[list[Any], ...], has_complex: bool) -> None:
    """Take torch's step of one group; nothing of it is fused."""
    names = "amsgrad lr weight_decay eps maximize foreach capturable differentiable"
    options: dict[str, Any] = {name: group[name] for name in names.split()}
    options["beta1"], options["beta2"] = group["betas"]
    step: Any = torch_adamw
    with torch.set_grad_enabled(group["differentiable"]):
        step(*lists, fused=False, has_complex=has_complex, **options)


def refuse_fused(fused: bool | None) -> None:
    """Raise for fused=True."""
    if fused:
        raise ArgumentError(
            expected="fused=None or False",
            received=f"fused={fused}",
            remedy="leave fused out: isobit's step is one pass over memory too, with the same bits however a parameter "
            "is sharded",
        )
