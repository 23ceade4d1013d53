"""GELU, by the error function and by tanh, forward and backward: one result per value, wherever it stands."""
