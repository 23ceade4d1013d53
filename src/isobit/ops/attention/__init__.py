"""Attention, forward and backward, with one fold over keys for prefill, chunks and decode."""
