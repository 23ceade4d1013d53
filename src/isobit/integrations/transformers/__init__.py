"""Run Hugging Face transformers models with isobit's operators."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
