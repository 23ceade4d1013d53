"""Gates: a whole model in every batch layout, and one training run in every layout of ranks."""

from isobit.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
