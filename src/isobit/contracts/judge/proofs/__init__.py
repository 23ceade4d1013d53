"""Proof engines: intervals, bit-vectors (Bitwuzla) and integers (z3)."""
