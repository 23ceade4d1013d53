"""Compiled GPU code, executed and compared without a GPU."""
