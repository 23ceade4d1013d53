"""Proofs about real Python functions, over all their inputs rather than over samples."""
