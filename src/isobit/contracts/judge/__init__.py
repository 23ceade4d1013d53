"""Judging a contract: inputs, relations, sabotage, search and proofs."""
