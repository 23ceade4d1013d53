"""The rank-layout gate: one training run in every layout of ranks and micro-batches."""
