"""The layer norm, forward and backward, with one order of addition."""
