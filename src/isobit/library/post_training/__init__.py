"""Contracts of pruning, merging, quantising and tokenizing, for tools of others: `isobit check --like prune`.

Each has a reference of a few lines, which is the subject of its contract and the oracle of its claims; isobit has no
such tools of its own.
"""
