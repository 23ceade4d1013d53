"""Benchmarks: ratios to stock, A and B interleaved in one run, medians; nothing is timed that is not green."""
