"""All-reduce, reduce-scatter and all-gather whose order of addition is fixed by rank.

Start with `tree_collectives.py`, the public functions. `transfers.py` explains the order in
[Note: the reduction tree over ranks] and has the two ways to move the bytes: messages and all-to-all.
"""
