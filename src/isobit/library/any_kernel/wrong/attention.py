"""Wrong attention, grouped-query attention and rotary embedding: computed in fp32, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.library.any_kernel.attention_operators import Gqa, Rope, repeated, turned
from isobit.library.any_kernel.subjects import attention
from isobit.library.gradients import with_value


def weighted(scores: Tensor, v: Tensor, ahead: int = 1) -> Tensor:
    """Return softmax(scores) v, with a causal mask that hides keys from `ahead` on."""
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(ahead)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def decodes_in_another_order(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Add the keys of a decoded token in another order."""
    if is_causal:
        return attention(q, k, v)
    return attention(q, k.flip(-2), v.flip(-2), False)


def sees_the_next_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mask one key too few."""
    wide = [t.float() for t in (q, k, v)]
    return weighted(wide[0] @ wide[1].mT * q.shape[-1] ** -0.5, wide[2], 2).to(q.dtype)


def without_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to every key."""
    wide = [t.float() for t in (q, k, v)]
    return (torch.softmax(wide[0] @ wide[1].mT * q.shape[-1] ** -0.5, -1) @ wide[2]).to(q.dtype)


def without_a_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Leave 1 / sqrt(depth) out."""
    wide = [t.float() for t in (q, k, v)]
    return weighted(wide[0] @ wide[1].mT, wide[2]).to(q.dtype)


def divided_by_the_depth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Divide by the depth instead of its root."""
    wide = [t.float() for t in (q, k, v)]
    return weighted(wide[0] @ wide[1].mT / q.shape[-1], wide[2]).to(q.dtype)


def scores_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute scores in bf16 for any dtype."""
    scores = (q.bfloat16() @ k.bfloat16().mT).float() * q.shape[-1] ** -0.5
    return weighted(scores, v.float()).to(q.dtype)


def probabilities_are_constants(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Take probabilities for constants, so that q and k have no gradient."""
    weights = Gqa.weights(q.float(), k.float())[0].detach()
    nothing = (q.float().sum() + k.float().sum()) * 0
    return (weights @ repeated(v.float(), q) + nothing).to(q.dtype)


def gradient_without_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Forget the scale in the gradients of q and k."""
    right = Gqa.reference(q.float(), k.float(), v.float())
    scale = q.shape[-1] ** 0.5
    steep = Gqa.reference(q.float() * scale, k.float(), v.float())
    return with_value(steep, right).to(q.dtype)


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Give query head h the key head h modulo their number."""
    times = q.shape[-3] // k.shape[-3]
    wide = q.float(), *(t.float().repeat(1, times, 1, 1) for t in (k, v))
    return Gqa.reference(*wide).to(q.dtype)


def first_group_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read the first key head for every query head."""
    wide = q.float(), *(t.float()[:, :1].expand_as(t) for t in (k, v))
    return Gqa.reference(*wide).to(q.dtype)


def last_head_counts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Overwrite a group's gradients by each head instead of adding."""
    group = q.shape[-3] // k.shape[-3]

    def copies(t: Tensor) -> Tensor:
        return torch.stack([*[t.detach()] * (group - 1), t], -3).flatten(-4, -3)

    return Gqa.reference(q.float(), copies(k.float()), copies(v.float())).to(q.dtype)


def mean_over_the_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Average a group's gradients instead of adding."""
    group = q.shape[-3] // k.shape[-3]
    less = [t.float() / group + t.float().detach() * (1 - 1 / group) for t in (k, v)]
    return with_value(
        Gqa.reference(q.float(), *less), Gqa.reference(q.float(), k.float(), v.float())
    ).to(q.dtype)


def turns_the_other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn by the opposite angle."""
    return Rope.reference(x.float(), cos.float(), -sin.float()).to(x.dtype)


def turns_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring elements together, as other models do."""
    apart = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    y = Rope.reference(apart.float(), cos.float(), sin.float())
    return torch.stack(y.chunk(2, -1), -1).flatten(-2).to(x.dtype)


def without_a_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Forget the minus of the first half."""
    low, high = x.float().chunk(2, -1)
    other = torch.cat([high, low], -1)
    return (x.float() * cos.float().unsqueeze(-3) + other * sin.float().unsqueeze(-3)).to(x.dtype)


def of_the_token_before(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Take the angles of the token before."""
    return Rope.reference(x.float(), cos.float().roll(1, -2), sin.float().roll(1, -2)).to(x.dtype)


def narrow_angles(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Round angles to sixteenths."""
    short = [(t.float() * 16).round() / 16 for t in (cos, sin)]
    return Rope.reference(x.float(), *short).to(x.dtype)


def gradient_turns_on(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the gradient forward instead of back."""
    wide = x.float(), cos.float(), sin.float()
    return with_value(Rope.reference(wide[0], wide[1], -wide[2]), Rope.reference(*wide)).to(x.dtype)


def gradient_is_passed_on(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Give x the gradient of the output as it is."""
    return with_value(x.float() * 1, Rope.reference(x.float(), cos.float(), sin.float())).to(
        x.dtype
    )


def other_when_decoded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn a single token with products that are not rounded."""
    if x.shape[-2] == 1:
        return Rope.reference(x.double(), cos.double(), sin.double()).to(x.dtype)
    return x * cos.unsqueeze(-3) + turned(x) * sin.unsqueeze(-3)
