"""Checkers, one per invariant: deadlock, mismatch, orphans, pending results, sent data, divergence, training."""
