"""The contract knowledge-distillation-kernel-v1 with its claims, planted wrong losses and proofs."""
