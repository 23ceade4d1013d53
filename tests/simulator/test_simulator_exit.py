"""Theorem: when a run has ended, the system has ended its threads, so that Python can exit."""

import os
import threading

import torch

from isobit.simulator.world import World


def test_a_rank_that_leaves_a_default_device_has_exited():
    # The thread drops torch's mode after `join` has returned; in a process that exits meanwhile, it would abort.
    ids = []

    def rank(index):
        ids.append(threading.get_native_id())
        torch.set_default_device("cpu")

    for _ in range(20):
        World(2, 0).run(rank, init=False)
    assert len(ids) == 40
    assert [i for i in ids if os.path.exists(f"/proc/self/task/{i}")] == []
