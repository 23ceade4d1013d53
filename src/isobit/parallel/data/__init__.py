"""Data parallelism: gradients of a global batch from micro-batches and ranks."""
