"""The root-mean-square norm, forward and backward, with one order of addition."""
