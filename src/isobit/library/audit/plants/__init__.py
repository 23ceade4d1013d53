"""Planted operators: each depends on one axis, in a small model that does not otherwise."""

from __future__ import annotations

from isobit.library.audit.plants import cached, forms, gradients, layers, padded, products, state
from isobit.library.audit.plants.plant import Plant

PLANTS: tuple[Plant, ...] = (
    *products.PLANTS,
    *layers.PLANTS,
    *forms.PLANTS,
    *state.PLANTS,
    *padded.PLANTS,
    *cached.PLANTS,
    *gradients.PLANTS,
)
