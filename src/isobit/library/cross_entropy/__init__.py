"""The contract cross-entropy-kernel-v1 with its claims, planted wrong kernels and proofs."""
