"""TRL's GRPOTrainer, GKDTrainer and RewardTrainer in one order of addition. Needs `pip install trl datasets`."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
