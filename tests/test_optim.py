"""One norm however gradients are cut, and a step that is each element's own.

1. Clipping scales as torch does. grad-norm-kernel-v1 judges that the norm of pieces is the norm of the whole.
2. AdamW's step is close to torch's, and each element's own; tests/ops/test_adamw_step.py has its bits. The fused form,
   whose tails have other bits, is refused, also from a state dict.
3. A weight that is or was frozen is stepped as any other; a step that raises counts nothing.
"""

import copy
import math

import pytest
import torch
from torch import nn

import isobit
from isobit import ArgumentError, UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.adamw import step as steps
from isobit.optim import AdamW, clip_grad_norm_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_grads(*grads):
    made = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = grad.clone()
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_torchs_within_a_rounding(dtype, limit):
    grads = [torch.randn(33, 7).to(dtype), torch.randn(5).to(dtype)]
    ours, theirs = with_grads(*grads), with_grads(*grads)
    norm = clip_grad_norm_(ours, limit)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.to(dtype), torch.nn.utils.clip_grad_norm_(theirs, limit))
    for a, b, grad in zip(ours, theirs, grads, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        assert bits.equal(a.grad, (grad.float() * scale).to(dtype))


def test_what_has_no_gradient_is_passed_over():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
    (one,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(one, 1.0).item() == 5.0
    assert clip_grad_norm_((p for p in [one]), 10.0).item() == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_norms_that_are_not_finite(wrong):
    grads = with_grads(torch.tensor([1.0, wrong]))
    with pytest.raises(UnsupportedError, match="not finite"):
        clip_grad_norm_(grads, 1.0, error_if_nonfinite=True)
    assert grads[0].grad[0] == 1.0  # untouched
    assert not clip_grad_norm_(grads, 1.0).isfinite()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ArgumentError, match="strided"):
        clip_grad_norm_(table.parameters(), 1.0)


def train(kind, values, steps=4, **options):
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimiser = kind(parameters, lr=1e-2, weight_decay=0.1, **options)
    for step in range(steps):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = (value * (step - 1.3)).cos()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sweep(2)
def test_steps_are_near_torchs_and_those_of_pieces(dtype, foreach):
    x = torch.randn(5003).to(dtype)
    whole = train(AdamW, [x], foreach=foreach)
    # In 16 bits torch rounds after each operation, so its steps are the worse ones.
    near = {torch.float32: 1e-6, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(whole, train(torch.optim.AdamW, [x]), rtol=near, atol=near)
    for pieces in (x.split(3), x.split(1000), x.tensor_split(7)):
        assert bits.equal(train(AdamW, pieces, foreach=foreach), whole)


def test_the_control_depends_on_the_pieces_and_is_refused():
    x = torch.randn(50_003)
    whole, pieces = (train(torch.optim.AdamW, parts, fused=True) for parts in ([x], x.split(3)))
    assert not bits.equal(whole, pieces)
    with pytest.raises(ArgumentError, match="fused"):
        AdamW([nn.Parameter(x)], fused=True)


def test_a_state_dict_brings_no_fused_form_back():
    x = nn.Parameter(torch.ones(3))
    x.grad = torch.ones(3)
    stock, ours = torch.optim.AdamW([x], fused=True), AdamW([x])
    stock.step()
    ours.load_state_dict(stock.state_dict())
    with pytest.raises(ArgumentError, match="fused"):
        ours.step()


def test_hooks_of_a_step_run_once():
    """Also where torch's AdamW was made before, which puts hooks around the parent's step."""
    parameter = torch.nn.Parameter(torch.ones(4))
    torch.optim.AdamW([parameter])
    optimizer, seen = AdamW([parameter]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert seen == ["before", "after"]
    assert not torch.equal(parameter, torch.ones(4))


@pytest.mark.parametrize("writer", [AdamW, torch.optim.AdamW])
def test_state_dicts_are_those_of_torch(writer):
    """A run that is continued from a state dict has the bits of one that was not interrupted."""
    x = torch.randn(37)

    def run(first, second):
        parameter = nn.Parameter(x.clone())
        optimizer = first([parameter], lr=1e-2)
        for step in range(4):
            if step == 2:
                state, optimizer = optimizer.state_dict(), second([parameter], lr=0.5)
                optimizer.load_state_dict(state)
            parameter.grad = (x * step).cos()
            optimizer.step()
        return parameter.detach(), optimizer.state_dict()

    (ours, left), (theirs, right) = run(writer, AdamW), run(writer, torch.optim.AdamW)
    torch.testing.assert_close(ours, theirs)
    assert left["param_groups"] == right["param_groups"]
    assert {k: v.dtype for k, v in left["state"][0].items()} == {
        k: v.dtype for k, v in right["state"][0].items()
    }
    if writer is AdamW:
        assert bits.equal(ours, train_on(x))


def train_on(x):
    parameter = nn.Parameter(x.clone())
    optimizer = AdamW([parameter], lr=1e-2)
    for step in range(4):
        parameter.grad = (x * step).cos()
        optimizer.step()
    return parameter.detach()


def test_a_state_of_another_shape_is_refused_before_anything_changes():
    first, second = with_grads(torch.ones(3), torch.ones(2))
    optimizer = AdamW([first, second])
    optimizer.step()
    before = first.detach().clone()
    optimizer.state[second]["exp_avg"] = torch.zeros(1_000_000)
    with pytest.raises(ArgumentError, match=r"mean of shape \[2\]"):
        optimizer.step()
    optimizer.state[second]["exp_avg"] = torch.zeros(2, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="one dtype"):
        optimizer.step()
    assert bits.equal(first.detach(), before)
    assert optimizer.state[first]["step"] == 1


@pytest.mark.parametrize("maximize", [False, True])
def test_amsgrad_is_torchs(maximize):
    x, options = torch.randn(300), {"amsgrad": True, "maximize": maximize}
    assert bits.equal(train(AdamW, [x], **options), train(torch.optim.AdamW, [x], **options))


def test_lr_as_a_tensor_maximize_and_complex_numbers():
    x = torch.randn(300)
    (plain,), (other,) = with_grads(x), with_grads(x)
    AdamW([plain], lr=0.25).step()
    AdamW([other], lr=torch.tensor(0.25)).step()
    assert bits.equal(plain.detach(), other.detach())
    (up,), (down,) = with_grads(x), with_grads(-x)
    AdamW([up], maximize=True).step()
    AdamW([down]).step()
    assert bits.equal(up.detach(), down.detach())
    pairs = nn.Parameter(torch.zeros(150, dtype=torch.complex64))
    pairs.grad = torch.view_as_complex(x.view(150, 2))
    AdamW([pairs], lr=0.25).step()
    assert bits.equal(torch.view_as_real(pairs.detach()).flatten(), plain.detach())


def test_gradients_below_the_limit_are_not_touched():
    (one,) = with_grads(torch.tensor([0.3, 0.4]))
    version = one.grad._version
    clip_grad_norm_(one, 1.0)
    assert one.grad._version == version
    clip_grad_norm_(one, 0.1)
    assert one.grad._version > version


@pytest.mark.parametrize("limit", [0.5, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_clipped_step_is_clipping_and_a_step(dtype, limit):
    values = [torch.randn(size).to(dtype) for size in (1, 33, 5000)]
    found = []
    for together in (True, False):
        parameters = with_grads(*values)
        optimizer, seen = AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}]), []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        for _ in range(3):
            if together:
                norm = optimizer.clip_and_step(limit)
                assert all(map(bits.equal, (p.grad for p in parameters), values))
            else:
                norm = clip_grad_norm_(parameters, limit)
                optimizer.step()
                for p, value in zip(parameters, values, strict=True):
                    p.grad = value.clone()
        assert len(seen) == 3
        states = [optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")]
        found.append([norm, *(p.detach() for p in parameters), *states])
    assert all(map(bits.equal, *found))


def test_what_a_clipped_step_cannot_do_is_refused_before_anything_changes():
    (one,) = with_grads(torch.tensor([3.0, math.inf]))
    with pytest.raises(UnsupportedError, match="not finite"):
        AdamW([one]).clip_and_step(1.0, error_if_nonfinite=True)
    with pytest.raises(UnsupportedError, match=r"amsgrad=True[\s\S]*clip_grad_norm_"):
        AdamW([one], amsgrad=True).clip_and_step(1.0)
    assert torch.equal(one, with_grads(torch.zeros(2))[0])


# ---- frozen weights: the loop of reinforcement learning ---------------------------------------------------------


def train_one(module, optimizer, clips):
    for p in module.parameters():
        p.grad = torch.full_like(p, 0.5)
    if clips:
        optimizer.clip_and_step(1.0)
    else:
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clips", [False, True], ids=["step", "clip_and_step"])
@pytest.mark.parametrize("thaws", [False, True], ids=["frozen", "thawed"])
@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_weights_that_are_or_were_frozen_are_stepped_as_others(dtype, clips, thaws):
    torch.manual_seed(0)
    module = isobit.nn.Linear(300, 65, dtype=dtype)
    twin = copy.deepcopy(module)
    optimizer, plain = AdamW(module.parameters()), AdamW(twin.parameters())
    x = torch.randn(3, 300).to(dtype)
    for _ in range(3):  # freeze, roll out, thaw, train
        frozen = isobit.freeze(module)
        with torch.no_grad():
            assert bits.equal(module(x), twin(x))
        if thaws:
            frozen.thaw()
        train_one(module, optimizer, clips)
        train_one(twin, plain, clips)
        with torch.no_grad():
            assert bits.equal(module(x), twin(x))
        frozen.thaw()
    assert all(map(bits.equal, module.parameters(), twin.parameters()))
    for p in module.parameters():
        assert optimizer.state[p]["step"] == 3


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_gradients_and_moments_that_share_memory_lazily_are_stepped_and_scaled():
    (ours,), (theirs,) = with_grads(torch.randn(33, 7)), with_grads(torch.zeros(33, 7))
    theirs.grad = ours.grad.clone()
    kept, before = torch._lazy_clone(ours.grad), ours.grad.clone()
    clip_grad_norm_([ours], 0.1)
    clip_grad_norm_([theirs], 0.1)
    assert bits.equal(ours.grad, theirs.grad)
    assert bits.equal(kept, before)


def test_a_step_that_raises_counts_nothing(monkeypatch):
    (p,) = with_grads(torch.ones(3))
    optimizer = AdamW([p])
    optimizer.step()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(steps, "adamw_", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert optimizer.state[p]["step"] == 1


@pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")
def test_a_version_changes_when_a_step_has_ended():
    """A thread that packs a frozen weight during the step reads the version before."""
    (p,) = with_grads(torch.ones(3))
    optimizer, version = AdamW([p]), p._version
    optimizer.step()
    assert p._version > version
