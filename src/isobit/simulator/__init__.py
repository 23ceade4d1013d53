"""Simulated ranks: run torch.distributed programs in one process, deterministically, and find their bugs.

`World(ranks, seed).run(function)` calls `function(rank)` on every rank. The program is unmodified: whatever backend it
names, the simulator serves it. One seed is one schedule. A failed run raises a `SimulationError` (isobit.errors) that
names the ranks at the root, with their stacks.

Start a run: `World`, `spawn`, `run_script`, `replay`. Inject faults: `Die`, `Stall`, `Straggle`, `Drop`, `Flip`,
`PlantNaN`, `draw_faults`. Check data: `same_on_all_ranks`, `compare_with_one`, `probe`.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
