"""Adapters for other libraries. Each is optional and imported only when it is used."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
