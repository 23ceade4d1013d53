"""Data parallelism: the gradient of a global batch from micro-batches and ranks.

Start with `gradients.py`, which describes how a gradient travels.
"""
