"""The contract distributed-training-v1 with its claims, planted wrong kernels and proofs."""
