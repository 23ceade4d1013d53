"""Where a step's time goes, from traces of torch.profiler: accounts that add up, bricks with bounds, ranks, findings.

`profile(paths)` in `api.py` does all of it. Neither reading nor reporting imports torch.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
