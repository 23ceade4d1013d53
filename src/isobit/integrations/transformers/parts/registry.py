"""The classes that the user registered: `isobit.parts.register`."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch import nn

from isobit.errors import ArgumentError, UnsupportedError
from isobit.integrations.transformers.parts.part import Forward, Part, plain_type
from isobit.integrations.transformers.parts.probing import TOLERANCE


class Formula:
    """What a registered class computes."""

    name = "part"  # of the part
    text = ""  # the formula, for messages

    def __init__(self) -> None:
        self._compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def part_for(self, name: str, module: nn.Module) -> Part:
        """Return the part of a module, after comparing the formula with its own forward."""
        if module not in self._compared:
            self._check(name, module)
            self._compared.add(module)
        return self.make(module)

    def make(self, module: nn.Module) -> Part:
        """Return the part."""
        raise NotImplementedError

    def difference(self, module: nn.Module) -> float | None:
        """Return the largest difference from the module's own forward; None where only the model can be compared."""
        return None

    tolerance = TOLERANCE

    def _check(self, name: str, module: nn.Module) -> None:
        if any(p.device.type == "meta" for p in module.parameters()):
            return
        kind = plain_type(module).__name__
        try:
            found = self.difference(module)
        except Exception as error:
            raise UnsupportedError(
                expected=f"{kind} to compute what it was registered as: {self.text or self.name}",
                received=f"an error, in {name}: {type(error).__name__}: {error}",
                remedy="register the formula with the names of the module's own attributes",
            ) from error
        if found is not None and not found <= self.tolerance:
            raise UnsupportedError(
                expected=f"{kind} to compute what it was registered as: {self.text or self.name}",
                received=f"{name}.forward differs from it by up to {found:.3g} of the largest element of a row",
                remedy="read the class's forward (where is eps added, is 1 added to the weight?), and register its "
                "formula",
            )


class OwnFunction(Formula):
    """The user's function over isobit's operators."""

    name = "own function"

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.forward = forward

    def make(self, module: nn.Module) -> Part:
        return Part("own function", self.forward, (), "registered", shipped=False)


REGISTERED: dict[type, Formula] = {}
Kind = TypeVar("Kind", bound=type[nn.Module])


def register(kind: Kind, formula: Formula | Any) -> Kind:
    """Tell `isobit.enable` what modules of a class compute.

    The formula is compared with the class's own forward when a model that has such a module is enabled, and the
    enabled model with the model itself on eight tokens.

    Args:
        kind: The class. Its subclasses are not registered with it.
        formula: One of `isobit.parts.rms_norm`, `layer_norm`, `linear_layer`, `token_embedding`, `rotary_embedding`,
            `swiglu_mlp`, `elementwise`, `composite` and `head`; or a function forward(module, *inputs) over isobit's
            operators, defined at the top of a module, so that it can be copied with the model.

    Returns:
        The class.

    Raises:
        ArgumentError: If these are not a class of modules and a formula or function.

    Example:
        >>> class MyNorm(torch.nn.Module):
        ...     def __init__(self, size):
        ...         super().__init__()
        ...         self.weight, self.epsilon = torch.nn.Parameter(torch.zeros(size)), 1e-6
        >>> isobit.parts.register(MyNorm, isobit.parts.rms_norm(eps="epsilon", offset=1.0)) is MyNorm
        True
        >>> isobit.parts.unregister(MyNorm)
        True
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ArgumentError(
            expected="a class of torch.nn.Module",
            received=repr(kind)
            if isinstance(kind, type)
            else f"an object of type {type(kind).__name__}",
            remedy="pass the class, such as type(model.layers[0].norm)",
        )
    if not isinstance(formula, Formula):
        if not callable(formula) or isinstance(formula, type):
            raise ArgumentError(
                expected="a formula of isobit.parts, or a function forward(module, *inputs)",
                received=f"an object of type {type(formula).__name__}",
                remedy='pass for example isobit.parts.rms_norm(eps="eps")',
            )
        formula = OwnFunction(formula)
    REGISTERED[kind] = formula
    return kind


def unregister(kind: type[nn.Module]) -> bool:
    """Forget what a class was registered as. Does nothing if it was not; enabled models stay as they are.

    Args:
        kind: The class.

    Returns:
        Whether it was registered.

    Example:
        >>> isobit.parts.unregister(torch.nn.Bilinear)
        False
    """
    return REGISTERED.pop(kind, None) is not None


def find_registered(kind: type) -> Formula | None:
    """Return what a class was registered as, or None."""
    return REGISTERED.get(kind)
