"""The exact sum of values or of squares, rounded once."""
