"""The contract dimension-independent-kernels-v1 with its claims, planted wrong kernels and proofs."""
