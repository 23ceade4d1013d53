"""The contract lm-head-kernel-v1 with its claims, planted wrong kernels and proofs."""
