"""isobit's own contracts, written as any user of `isobit.contracts` would write them.

A folder per subject has contract.yaml, claims.py (predicates), planted.py (wrong kernels that claims must catch),
orders.py (order certificates) and proofs.py. Shared by the subjects: `stock` (what PyTorch computes), `refused_calls`,
`placements` of samples, `gradients`, `certificates`, `bounds` and `subjects`.
"""
