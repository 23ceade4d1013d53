"""Attention, its gradient and a paged cache of keys and values."""
