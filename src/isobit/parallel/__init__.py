"""Ranks: what each holds, and sums over them that have the bits of one rank's."""
