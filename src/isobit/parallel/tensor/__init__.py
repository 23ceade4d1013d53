"""Tensor parallelism: layers split over ranks, with the bits of the unsplit layer."""
