"""Two things that should be equal: checkpoints, dumps, runs, rollouts, a served model."""
