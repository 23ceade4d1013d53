"""The contract linear-group-kernel-v1 with its claims, planted wrong kernels and proofs."""
