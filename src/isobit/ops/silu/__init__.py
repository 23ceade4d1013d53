"""SiLU, forward and backward: one result per value, wherever it stands."""
