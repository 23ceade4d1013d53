"""The batch-layout gate: one model, forward and backward, in every layout of one batch.

The command is `isobit gate model`. Start with `batch_layout_gate.py`.
"""
