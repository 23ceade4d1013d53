"""The order of addition, defined in plain Python for every executor: start with plan.py, then tree.py."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
