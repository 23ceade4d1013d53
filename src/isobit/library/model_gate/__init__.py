"""The contract chain-v1 with its claims, planted wrong kernels and proofs."""
