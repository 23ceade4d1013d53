"""isobit's own contracts: one folder per subject with its claims, planted wrong kernels and proofs."""
