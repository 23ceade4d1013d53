"""Which rows of a tensor belong to which sample, followed through operators that move rows."""
