"""The contract embedding-kernel-v1 with its claims, planted wrong kernels and proofs."""
