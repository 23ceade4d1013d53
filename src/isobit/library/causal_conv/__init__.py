"""Contract of isobit.causal_conv."""
