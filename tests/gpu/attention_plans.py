"""Calls of attention; attention and its gradient by tests.certifying.plan, in bits, over a target's tensor core."""

import numpy as np
import torch

import isobit
from isobit import bits
from isobit.certifying.names.leaf import ENGINE_OF_TARGET
from isobit.ops.portable.elementary import log_positive
from isobit.order.plan import ATTENTION_CHUNK
from tests.certifying.plan.attention import Head, Seen
from tests.certifying.plan.attention_backward import HeadGrads
from tests.certifying.plan.domain import Values
from tests.certifying.plan.operators import Arithmetic

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(queries, keys, heads=2, key_heads=1, depth=16, dtype=torch.float32):
    q = draw(queries, heads, depth, dtype=dtype, seed=1)
    return q, *(draw(keys, key_heads, depth, dtype=dtype, seed=seed) for seed in (2, 3))


def with_grads(q, k, v, grad, **how):
    """y, dq, dk, dv."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = isobit.attention(*leaves, **how)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


def same(found, known):
    return all(bits.equal(a, b) for a, b in zip(found, known, strict=True))


def raw(tensor):
    if tensor.dtype == torch.float32:
        return tensor.detach().numpy()
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def cooked(array, dtype):
    array = np.ascontiguousarray(array)
    if dtype == torch.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(dtype)


class SamplePlan:
    """One sample: q [R, H, D], and k and v [T, H_kv, D] of all its keys."""

    def __init__(
        self, q, k, v, *, target, is_causal=True, window=0, softcap=0.0, chunk_size=0, chunk=None
    ):
        self.dtype, self.group = q.dtype, q.shape[1] // k.shape[1]
        self.plan = Arithmetic(Values(), NAMES[q.dtype], ENGINE_OF_TARGET[target])
        self.q, self.k, self.v = raw(q), raw(k), raw(v)
        keys, position = len(k), len(k) - len(q) + np.arange(len(q))
        end = np.minimum(position + (1 if is_causal else window or keys), keys)
        begin = np.maximum(position + 1 - (window or keys), 0)
        if chunk_size:
            begin = np.maximum(begin, position // chunk_size * chunk_size)
        self.seen, self.cap = Seen(begin, end), softcap
        self.scale = float(np.float32(q.shape[-1] ** -0.5))
        self.chunk = chunk or ATTENTION_CHUNK

    def head(self, h):
        of = h // self.group
        return Head(
            self.plan,
            self.q[:, h],
            self.k[:, of],
            self.v[:, of],
            self.seen,
            self.scale,
            self.chunk,
            self.cap,
        )

    def forward(self):
        return cooked(
            np.stack([self.head(h).attend() for h in range(self.q.shape[1])], 1), self.dtype
        )

    def lse(self, h):
        state = self.head(h).folded()
        total = torch.from_numpy(np.ascontiguousarray(state.total))
        return (torch.from_numpy(np.ascontiguousarray(state.most)) + log_positive(total))[
            :, 0
        ].numpy()

    def backward(self, grad):
        """dq, dk, dv, in the dtype of q."""
        y, grad = raw(self.forward()), raw(grad)
        dq, dk, dv = [], [], []
        for of in range(self.k.shape[1]):
            key_sums = value_sums = self.plan.full(self.k[:, of].shape, 0.0)
            for h in range(of * self.group, (of + 1) * self.group):
                grads = HeadGrads(
                    self.plan,
                    grad[:, h],
                    self.q[:, h],
                    self.k[:, of],
                    self.v[:, of],
                    y[:, h],
                    self.lse(h),
                    self.seen,
                    self.scale,
                    self.cap,
                )
                dq.append(grads.result(grads.query_grads()))
                key_sums, value_sums = grads.add_key_grads(key_sums, value_sums)
            dk.append(grads.result(key_sums))
            dv.append(grads.result(value_sums))
        return tuple(cooked(np.stack(each, 1), self.dtype) for each in (dq, dk, dv))
