"""The exit gate: a whole model, forward and backward, under every layout of one batch."""
