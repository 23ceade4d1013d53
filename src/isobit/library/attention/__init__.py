"""The contract attention-kernel-v1 with its claims, planted wrong kernels and proofs."""
