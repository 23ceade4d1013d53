"""The rank-layout gate: one training run in every layout of ranks and micro-batches.

The command is `isobit gate training`. Start with `train_isobit.py`, the program that one rank runs.
"""
