"""The contract training-stability-v1: a small training program, its claims, and planted wrong programs."""
