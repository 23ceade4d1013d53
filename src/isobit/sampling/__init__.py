"""Draw tokens by a key, and give the log-probability of the policy that drew them; shared by rollout and trainer."""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
