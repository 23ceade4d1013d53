"""Claims, planted wrong kernels and proofs that rmsnorm-kernel-v1 and layernorm-kernel-v1 share."""
