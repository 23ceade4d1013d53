"""`isobit.guards.watch` for Lightning. Needs `pip install isobit[lightning]`."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
