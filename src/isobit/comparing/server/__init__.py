"""Audit a server through its API: whether an answer depends on what else the server does."""
