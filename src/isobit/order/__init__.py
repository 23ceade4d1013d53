"""The order of addition: defined here once, in plain Python, for every executor."""

from isobit.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
