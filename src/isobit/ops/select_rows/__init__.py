"""Chosen rows of a tensor, and their gradient."""
