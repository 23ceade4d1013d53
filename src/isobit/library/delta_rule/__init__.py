"""Contract of isobit.delta_rule."""
