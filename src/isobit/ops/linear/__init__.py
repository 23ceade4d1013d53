"""A linear layer, forward and backward, with one order of addition."""
