"""Checkers, one per invariant: deadlock, mismatched calls, early reads, replicas, training."""
