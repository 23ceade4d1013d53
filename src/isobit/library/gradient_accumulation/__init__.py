"""The contract gradient-accumulation-v1 with its claims, planted wrong kernels and proofs."""
