"""Kernels of others that are right: each row by itself, in memory of its own, by torch or transformers."""

import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb


def alone(function, *rows, rest=()):
    """Call a function on each row, copied, and put the results together."""
    each = [
        function(*(t.clone().unsqueeze(0) for t in one), *rest) for one in zip(*rows, strict=True)
    ]
    return torch.cat(each) if each else rows[0].clone()


def copies(*tensors):
    """Copy what may be strided."""
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)


def linear(x, weight, bias):
    """Autograd adds the rows' gradients of the weight in fp32."""
    y = alone(F.linear, x.float(), rest=copies(weight.float(), bias.float()))
    return y.to(x.dtype)


def rms_norm(x, weight):
    """What transformers' Qwen3 computes."""
    norm = Qwen3RMSNorm(x.shape[-1], eps=1e-6)
    return alone(lambda x: torch.func.functional_call(norm, {"weight": weight}, (x,)), x)


def layer_norm(x, weight, bias):
    return alone(lambda x: F.layer_norm(x, x.shape[-1:], *copies(weight, bias), 1e-5), x)


def softmax(x):
    return alone(lambda x: torch.softmax(x, -1), x)


def softmax_in_fp64(x):
    return torch.softmax(x.double(), -1).to(x.dtype)


def log_softmax(x):
    return alone(lambda x: torch.log_softmax(x, -1), x)


def log_softmax_by_parts(x):
    """Subtract the maximum, then the logarithm of the sum."""

    def by_parts(x):
        shifted = x.float() - x.float().amax(-1, keepdim=True)
        return (shifted - shifted.exp().sum(-1, keepdim=True).log()).to(x.dtype)

    return alone(by_parts, x)


def silu(x):
    return alone(F.silu, x)


def silu_by_sigmoid(x):
    return alone(lambda x: x * torch.sigmoid(x), x)


def gelu(x):
    return alone(F.gelu, x)


def swiglu(gate, up):
    return alone(lambda gate, up: F.silu(gate) * up, gate, up)


def attention(q, k, v, is_causal=True):
    """Every query by itself, over the keys that it sees."""

    def one(q, k, v):
        tokens, keys = q.shape[-2], k.shape[-2]
        seen = range(keys - tokens + 1, keys + 1) if is_causal else [keys] * tokens
        rows = [
            torch.softmax(
                q[..., i : i + 1, :].clone().double()
                @ k[..., :n, :].double().mT
                * q.shape[-1] ** -0.5,
                -1,
            )
            @ v[..., :n, :].double()
            for i, n in enumerate(seen)
        ]
        return torch.cat(rows, -2).to(q.dtype)

    return alone(one, q, k, v)


def gqa(q, k, v, is_causal=True):
    """Repeat the key heads of each group."""
    group = q.shape[-3] // k.shape[-3]
    return attention(q, *(t.float().repeat_interleave(group, -3) for t in (k, v)), is_causal)


def rope(x, cos, sin):
    """What transformers computes for queries."""
    return alone(lambda *given: apply_rotary_pos_emb(given[0], *given)[0], x, cos, sin)


def rope_in_fp64(x, cos, sin):
    low, high = x.double().chunk(2, -1)
    other = torch.cat([-high, low], -1)
    return (x.double() * cos.unsqueeze(-3) + other * sin.unsqueeze(-3)).to(x.dtype)


def embedding(ids, weight):
    """Autograd adds the table's gradient in fp32."""
    return F.embedding(ids, weight.float()).to(weight.dtype)


def cross_entropy(logits, targets):
    return alone(lambda *given: F.cross_entropy(*given, reduction="none"), logits, targets)


def cross_entropy_in_fp32(logits, targets):
    return cross_entropy(logits.float(), targets)


def logprob(hidden, weight, targets):
    """What TRL computes: logits, then log_softmax at the targets."""

    def one(hidden, targets):
        found = torch.log_softmax(F.linear(hidden, wide).float(), -1)
        chosen = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return chosen.masked_fill(targets == -100, 0)

    (wide,) = copies(weight.float())
    return alone(one, hidden.float(), targets)
