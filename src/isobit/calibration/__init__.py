"""Statistics of calibration whose bits do not depend on batch, threads or ranks: Hessians, column norms, ranges."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
