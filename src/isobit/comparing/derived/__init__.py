"""Checkpoints that were made from others: pruned, merged or quantised. Are they what they are said to be?

The command is `isobit compare derived`. `pruned.py` counts zeros, `merged.py` repeats a merge within the error of its
arithmetic, `quantised.py` decodes the layouts of `packed.py`. Tensors are read one at a time.
"""
