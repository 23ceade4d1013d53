"""Softmax, forward and backward, with one order of addition."""
