"""Compare what a rollout engine and a trainer computed: semantics first, then weights, then numerics."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
