"""Reveal the order in which a function adds numbers, and compare it between configurations.

`order` reveals one sum, `certify` compares many configurations of it, `targets` wraps sums inside torch functions.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
