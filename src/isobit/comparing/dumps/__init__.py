"""Compare dumps of two runs: torch DebugMode logs, SGLang dumper files, folders of tensors."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
