"""Detect what strict mode could not see: hooks that run in backward, and tensors handed to NumPy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from isobit.integrations.transformers.refusals import refuse

LATER = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
OUTSIDE = frozenset(("numpy", "__array__", "__dlpack__"))


class Escapes(TorchFunctionMode):
    """Raise at the call itself, so that the traceback shows the hook that made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LATER and args and isinstance(args[0], Tensor):
            refuse(
                "no tensor hook inside the model in strict mode: it runs in backward, where operators are not watched",
                f"Tensor.{name}",
                "change gradients after backward, or pass strict=False to isobit.enable",
            )
        if name in OUTSIDE and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            refuse(
                "computations by torch inside the model in strict mode: what NumPy adds is not seen",
                f"Tensor.{name} of a floating tensor",
                "compute with operators of isobit, or pass strict=False to isobit.enable",
            )
        return func(*args, **(kwargs or {}))
