"""Two things that should be equal: checkpoints, dumps, runs, rollouts, a served model."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
