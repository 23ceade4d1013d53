"""Checks of a run while it trains: losses, gradients, weights, optimizer state, replicas."""
