"""The contract tree-collective-v1 with its claims, planted wrong kernels and proofs."""
