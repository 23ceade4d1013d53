"""isobit's own contracts, written as any user of `isobit.contracts` would write them.

A subject is `NAME.contract.yaml` with its predicates in `NAME.py`. One that needs more is a folder: contract.yaml,
claims.py (predicates), planted.py (wrong kernels that claims must catch) and orders.py (order certificates). Shared by
the subjects: `claims`, `stock` (what PyTorch computes), `refused_calls` and `certificates`.
"""
