"""Subnormal numbers are kept, whatever torch.set_flush_denormal says, in every thread, before or after a first call."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import isobit
from isobit.foundation import machine
from isobit.foundation import machine as isolation
from tests.attacks.operators import FEATURES, ROWS, digests, draw, force_portable


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


def test_the_question_may_be_asked_inside_every_mode():
    def ask():
        seen = []
        with torch.device("meta"), FakeTensorMode(), torch.inference_mode():
            seen.append(machine.flushes_subnormals(workers=True))
        torch.func.vmap(lambda x: seen.append(machine.flushes_subnormals(workers=True)) or x)(
            torch.ones(2)
        )
        return seen

    assert ask() == [False, False]
    assert with_flushing_workers(ask) == [True, True]


def with_flushing_caller(function):
    """`function` in a thread that flushes subnormals itself, with threads of its pool that keep them."""

    def run():
        torch.set_num_threads(2)
        torch.zeros(1 << 20).exp()
        torch.set_flush_denormal(True)
        return function()

    return in_new_thread(run)


WAYS = [with_flushing_caller, with_flushing_workers]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("executor", ["native or portable", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sweep(4)
def test_operators_keep_subnormals(dtype, executor, way, monkeypatch):
    if executor == "portable":
        force_portable(monkeypatch)
    tiny = draw(ROWS, FEATURES, dtype=dtype, seed=5) * 1e-39
    assert 0 < tiny.abs().max() < torch.finfo(torch.float32).tiny
    expected = digests(dtype, tiny)
    assert expected != digests(dtype, torch.zeros_like(tiny))
    assert way(lambda: digests(dtype, tiny)) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_the_portable_executor_does_not_depend_on_its_neighbours(way, monkeypatch):
    force_portable(monkeypatch)
    rows, weight = draw(4096, 8) * 1e-20, torch.full((32, 8), 1e-19)
    whole, alone = way(lambda: (isobit.linear(rows, weight), isobit.linear(rows[-1:], weight)))
    assert whole.count_nonzero() > 0
    assert isobit.bits.equal(whole[-1:], alone)


def step(grads, weights, lr):
    """AdamW's weights and state after two steps."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = isobit.optim.AdamW([parameter], lr=lr)
    for _ in range(2):
        parameter.grad = grads.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return state["exp_avg_sq"], state["exp_avg"], parameter.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lr", [1e-3, 1e-38])
def test_the_optimizer_keeps_subnormals(lr, way):
    grads, weights = draw(100_003) * 1e-20, draw(100_003, seed=1) * (1.0 if lr > 1e-30 else 1e-38)
    expected = step(grads, weights, lr)
    assert 0 < expected[0].max() < torch.finfo(torch.float32).tiny
    for found, known in zip(way(lambda: step(grads, weights, lr)), expected, strict=True):
        assert isobit.bits.first_difference(found, known) is None


@pytest.mark.parametrize("way", WAYS)
def test_clipping_keeps_subnormals(way):
    grads, least = draw(100_003) * 1e-20, torch.full((1,), 2.0**-140)

    def clip():
        parameter = torch.nn.Parameter(torch.zeros(100_003))
        parameter.grad = grads.clone()
        norm = isobit.optim.clip_grad_norm_([parameter], 1e-26)
        return parameter.grad, norm, isobit.optim.get_total_norm([least])

    expected = clip()
    assert 0 < expected[0].abs().max() < torch.finfo(torch.float32).tiny
    assert 0 < expected[2] < torch.finfo(torch.float32).tiny
    for found, known in zip(way(clip), expected, strict=True):
        assert isobit.bits.first_difference(found, known) is None


def test_a_closure_runs_as_the_caller_left_it():
    def run():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = isobit.optim.AdamW([parameter], lr=0.1)

        def closure():
            assert machine.flushes_subnormals()
            loss = isobit.exact_sum(parameter * 2)
            loss.backward()
            return loss

        with torch.no_grad():
            return optimizer.step(closure).detach(), parameter.detach()

    loss, weights = with_flushing_caller(run)
    assert float(loss) == 6.0
    assert (weights < 1).all()


def test_an_error_apart_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        isolation.run_apart(lambda: 1 // 0)
    apart = isolation.run_apart(
        lambda: (torch.is_grad_enabled(), machine.flushes_subnormals(workers=True))
    )
    assert apart == (True, False)
