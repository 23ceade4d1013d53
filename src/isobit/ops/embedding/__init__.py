"""Embedding lookup, the gradient of the table, and tables that are cut over ranks."""
