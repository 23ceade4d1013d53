"""Tied weights: parameters that several modules use, such as embeddings shared with the LM head."""

from __future__ import annotations

import copy
from functools import partial

from torch import Tensor, nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.portable.sums import settle_nans
from isobit.parallel.collectives.elementwise_add import add_into, round_total


class TiedWeights:
    """Gives every use of a tied parameter a leaf of its own in the same memory.

    Each use then has a gradient of its own, which is one sum over the samples. The gradients of the
    uses are rounded and added at the end, as autograd does for a whole batch.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace every use but the first of each tied parameter by a leaf of its own."""
        self.leaves: list[nn.Parameter] = []  # in the order of the modules
        self._original: dict[nn.Parameter, nn.Parameter] = {}  # by leaf
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                leaf = parameter
                if parameter in self._original:
                    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    # A deep copy of the model has tied weights again.
                    leaf.__deepcopy__ = partial(copy.deepcopy, parameter)  # type: ignore[method-assign]
                    module._parameters[name] = leaf
                    self._replaced.append((module, name, parameter))
                self._original[leaf] = parameter
                self.leaves.append(leaf)

    def round_and_add(
        self, totals: dict[nn.Parameter, Tensor], settled: bool
    ) -> dict[nn.Parameter, Tensor]:
        """Round each use's gradient once, then add the uses in the order of the modules.

        `settled` sums, those of an exchange, have one NaN already.
        """
        added: dict[nn.Parameter, Tensor] = {}
        for leaf in self.leaves:
            if leaf in totals:
                first, rounded = self._original[leaf], totals[leaf]
                if not settled or rounded.dtype != leaf.dtype:
                    rounded = round_total(rounded, leaf.dtype)
                added[first] = (
                    rounded if first not in added else settle_nans(add_into(added[first], rounded))
                )
        return added

    def check_shared_memory(self) -> None:
        """Require that all uses still share memory.

        Raises:
            ArgumentError: The model was converted or moved, which gave each use its own memory.
        """
        if any(leaf.data_ptr() != first.data_ptr() for leaf, first in self._original.items()):
            raise ArgumentError(
                expected="tied parameters in the memory that they had when Gradients was made",
                received="memory of their own",
                remedy="convert and move the model first, then make Gradients",
            )

    def close(self) -> None:
        """Put the tied parameters back."""
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter


def check_not_tied(model: nn.Module) -> None:
    """Require that each parameter is used by one module: DDP and FSDP2 do not know extra leaves.

    Raises:
        UnsupportedError: The model has a tied parameter.
    """
    seen: set[Tensor] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter in seen:
                raise UnsupportedError(
                    expected="parameters that one module each uses",
                    received=f"a tied parameter {list(parameter.shape)}",
                    remedy="pass the model itself to Gradients, without the wrapper; or untie the "
                    "weights",
                )
            if parameter is not None:
                seen.add(parameter)
