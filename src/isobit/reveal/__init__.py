"""Reveal the order in which a function adds numbers, and compare it between configurations.

`order` reveals one sum, `compare_orders` compares many configurations of it, `targets` wraps sums inside functions of
torch.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(
    __name__, __file__, {"certify": "compare_orders", "Certificate": "OrderComparison"}
)
