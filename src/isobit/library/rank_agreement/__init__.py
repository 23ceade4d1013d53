"""The contract rank-agreement-v1 with its claims, planted wrong kernels and proofs."""
