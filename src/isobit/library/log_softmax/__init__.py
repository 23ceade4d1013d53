"""The contract log-softmax-kernel-v1 with its claims, planted wrong kernels and proofs."""
