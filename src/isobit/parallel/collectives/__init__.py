"""All-reduce, reduce-scatter and all-gather whose order of addition is fixed by rank.

Start with `tree_collectives.py`, the public functions. `recursive_halving.py` explains the order,
`send_recv.py` and `all_to_all.py` are the two ways to move the bytes.
"""
