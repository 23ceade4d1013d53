"""The exact sum of values or of squares, rounded once: a scalar without an order."""
