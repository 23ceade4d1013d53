"""Subnormal numbers are kept, whatever torch.set_flush_denormal says, in every thread, before or after a first call."""

import threading

import torch

from isobit import machine


def in_new_thread(function):
    """The result of `function` in a thread that has no torch pool yet; errors are raised here."""
    box = []

    def run():
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value


def with_flushing_workers(function):
    """`function` in a thread that keeps subnormals while the threads of its pool do not."""

    def run():
        torch.set_num_threads(2)
        torch.set_flush_denormal(True)
        torch.zeros(1 << 20).exp()  # starts the pool
        torch.set_flush_denormal(False)
        return function()

    return in_new_thread(run)


def test_the_mode_of_this_thread_and_of_its_pool_is_known():
    assert not in_new_thread(machine.flushes_subnormals)
    assert not in_new_thread(lambda: machine.flushes_subnormals(workers=True))
    assert in_new_thread(lambda: torch.set_flush_denormal(True) and machine.flushes_subnormals())
    assert not with_flushing_workers(machine.flushes_subnormals)
    assert with_flushing_workers(lambda: machine.flushes_subnormals(workers=True))
