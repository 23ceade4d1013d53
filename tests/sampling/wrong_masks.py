"""Dropout masks that are wrong in one way each; the tests must tell every one of them from keyed_dropout."""

import torch

from isobit.integrations.transformers.dropout import number_rows
from isobit.sampling.dropout import drop, row_keys


def keyed(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """Drop as an enabled model does."""
    samples, positions = number_rows(layout, first)
    return drop(x, p, row_keys(seed, step, samples, positions, len(samples)), module)


def grid(x):
    batch, width = x.shape[:2]
    rows = torch.arange(batch * width)
    return rows // width, rows % width


def keyed_by_row_of_the_batch(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """The key has the row of the batch instead of the sample of the global batch."""
    _, positions = number_rows(layout, first)
    return drop(x, p, row_keys(seed, step, grid(x)[0], positions, len(positions)), module)


def keyed_by_padded_position(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """The key has the column of the batch instead of the position in the sample."""
    samples, _ = number_rows(layout, first)
    return drop(x, p, row_keys(seed, step, samples, grid(x)[1], len(samples)), module)


def keyed_by_sample_of_the_call(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """Samples are counted in each micro-batch from 0."""
    return keyed(x, p, layout, 0, seed=seed, step=step, module=module)


def one_generator_of_the_batch(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """One torch generator draws for all rows, as torch's dropout does."""
    generator = torch.Generator().manual_seed(seed + step)
    keep = torch.rand(x.shape, generator=generator) >= p
    return torch.where(keep, x, 0.0) / (1 - p)


def without_module(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """Every module has the same mask."""
    return keyed(x, p, layout, first, seed=seed, step=step, module="")


def without_step(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """Every step has the same mask."""
    return keyed(x, p, layout, first, seed=seed, step=0, module=module)


def without_channel(x, p, layout, first, *, seed=7, step=3, module="q_proj"):
    """A row is dropped as a whole."""
    one = keyed(torch.ones_like(x[..., :1]), p, layout, first, seed=seed, step=step, module=module)
    return x * one


WRONG_IN_A_LAYOUT = [
    keyed_by_row_of_the_batch,
    keyed_by_padded_position,
    keyed_by_sample_of_the_call,
    one_generator_of_the_batch,
]
WRONG_IN_THE_KEY = [without_module, without_step, without_channel]
