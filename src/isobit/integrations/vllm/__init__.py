"""Run vLLM with isobit's operators, so that rollouts have the bits of the trainer."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
