"""The batch-layout gate: a whole model, forward and backward, in every layout of one batch."""
