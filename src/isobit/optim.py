"""Exact global-norm clipping, and AdamW restricted to its element-wise implementations (no `fused`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.isolation import keeping_subnormals
from isobit.ops.adamw import step as steps
from isobit.ops.adamw.portable import numbers_of
from isobit.ops.exact_sum.op import exact_state_anywhere, round_state
from isobit.ops.gpu.executors import is_asked_for
from isobit.ops.portable.rounding import settle_nans
from isobit.ops.unfinished import refuse_unfinished

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
    norm = get_total_norm(grads)
    if error_if_nonfinite and not norm.isfinite():
        raise UnsupportedError(
            expected="gradients of finite norm",
            received=f"a norm of {norm.item()}",
            remedy="find the gradient that is not finite, or pass error_if_nonfinite=False",
        )
    scale_by_norm(grads, norm, max_norm)
    return norm


@keeping_subnormals
def scale_by_norm(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place; each product is rounded once to its dtype."""
    norm = norm.cpu()  # one number; the scale is computed on the host
    scale = (max_norm / (norm + MARGIN)).clamp(max=1.0)
    finite = bool(norm.isfinite())
    for grad in grads:
        if is_asked_for((grad,)):
            grad.copy_(steps.scaled(grad, float(scale)))
            continue
        grad.mul_(scale)
        if not finite:  # inf · 0: the bits of a 16-bit NaN would depend on its position
            settle_nans(grad)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW without `fused`, whose result for an element depends on its position in memory.

    The plain and the foreach implementation give an element the same bits wherever it is and however the parameter is
    sharded. All other arguments are those of torch.optim.AdamW.

    Raises:
        ArgumentError: If fused is True.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = isobit.optim.AdamW([p], lr=0.1)
        >>> p.sum().backward()
        >>> optimizer.step()
    """

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
            ArgumentError: If a loaded state dict has set fused.
        """
        for group in self.param_groups:
            refuse_fused(group["fused"])
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_asked_for(tuple(p for group in self.param_groups for p in group["params"])):
            step_by_kernels(self)
        else:
            keeping_subnormals(unhooked_step)(self)
        return loss


@torch.no_grad()
def step_by_kernels(optimizer: AdamW) -> None:
    """Take a step of parameters on GPUs, or on a chosen backend, by isobit's own kernels: the bits of the CPU's step.

    Raises:
        UnsupportedError: If the optimizer was made with an option that has no kernel.
    """
    for group in optimizer.param_groups:
        refuse_without_kernel(group)
    for group in optimizer.param_groups:
        lists: tuple[list[Any], ...] = ([], [], [], [], [], [])
        optimizer._init_group(group, *lists)  # type: ignore[no-untyped-call]
        params, grads, firsts, seconds, _, counts = lists
        for p, grad, first, second, count in zip(
            params, grads, firsts, seconds, counts, strict=True
        ):
            count += 1
            betas, decay = tuple(map(float, group["betas"])), group["weight_decay"]
            numbers = numbers_of(float(group["lr"]), betas, group["eps"], decay, count.item())  # type: ignore[arg-type]
            for old, new in zip(
                (p, first, second), steps.adamw(p, grad, first, second, numbers), strict=True
            ):
                old.copy_(new)


def refuse_without_kernel(group: dict[str, Any]) -> None:
    """Raise for options of AdamW that no kernel of isobit has."""
    for name in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group[name]:
            raise UnsupportedError(
                expected=f"AdamW without {name} for parameters on a GPU",
                received=f"{name}=True",
                remedy=f"leave {name} out, or keep the parameters on the CPU",
            )


def unhooked_step(optimizer: AdamW) -> None:
    """Run torch's step without its hooks, which already ran around AdamW.step."""
    step: Any = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def refuse_fused(fused: bool | None) -> None:
    """Raise for fused=True."""
    if fused:
        raise ArgumentError(
            expected="fused=None or False",
            received=f"fused={fused}",
            remedy="leave fused out, or pass foreach=True; both give an element the same bits however it is sharded",
        )
