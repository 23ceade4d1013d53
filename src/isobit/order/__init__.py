"""The order of addition: decided here once, in plain Python, for every executor."""
