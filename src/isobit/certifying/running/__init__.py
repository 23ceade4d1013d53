"""Compile the kernels that a function launches, and execute them without a GPU."""
