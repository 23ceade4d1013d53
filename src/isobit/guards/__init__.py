"""What is watched: a configuration before anything runs, and the ranks of a live run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isobit.guards.agreement import Agreement, Disagreement, rank_agreement

__all__ = ["Agreement", "Disagreement", "rank_agreement"]


def __getattr__(name: str) -> Any:
    """Imported when first asked for: configurations are judged without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'isobit.guards' has no attribute {name!r}")
    return getattr(import_module("isobit.guards.agreement"), name)
