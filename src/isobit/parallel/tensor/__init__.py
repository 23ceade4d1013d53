"""Tensor parallelism: layers that are split over ranks and have the bits of the unsplit layer.

Start with `styles.py` (plans for parallelize_module) and `RowParallelLinear` in `linear.py` (one whole operator).
"""
