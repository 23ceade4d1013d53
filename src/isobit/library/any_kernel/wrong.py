"""Wrong kernels, computed in fp32 and rounded once, with one mistake each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library import stock
from isobit.library.any_kernel.operators import (
    LAYER_EPS,
    RMS_EPS,
    CrossEntropy,
    Gqa,
    Logprob,
    Rope,
    repeated,
    turned,
)
from isobit.library.any_kernel.subjects import attention
from isobit.library.claims import with_backward, with_value
from isobit.library.stock import IGNORED

LARGEST_OF_FP16 = torch.finfo(torch.float16).max

# Products, norms, softmaxes and activations.


def narrowed(x: Tensor, dropped: int = 13) -> Tensor:
    """Return fp32 values with mantissas cut, by 13 bits as TF32 does."""
    return (x.float().view(torch.int32) & -(1 << dropped)).view(torch.float32)


def linear_in_tf32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Cut the factors to ten bits."""
    cut = [t.float() + (narrowed(t) - t.float()).detach() for t in (x, weight)]
    return F.linear(cut[0], cut[1], bias.float()).to(x.dtype)


def linear_without_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Forget the bias."""
    return F.linear(x.float(), weight.float(), bias.float() * 0).to(x.dtype)


def linear_sums_in_bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add the products of eight features after another in bf16."""
    total = bias.float()
    for a, b in zip(torch.split(x.float(), 8, -1), torch.split(weight.float(), 8, -1), strict=True):
        total = (total + F.linear(a, b)).bfloat16().float()
    return total.to(x.dtype)


def linear_with_mean_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Average the parameters' gradients over the rows."""
    right = F.linear(x.float(), weight.float(), bias.float())
    less = [t.float() / (len(x) + 1) for t in (weight, bias)]
    return with_value(F.linear(x.float(), *less), right).to(x.dtype)


def rms_norm_sums_in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Add the squares in bf16."""
    total = x.bfloat16().square().cumsum(-1, dtype=torch.bfloat16)[..., -1:].float()
    return (x.float() * (total / x.shape[-1] + RMS_EPS).rsqrt() * weight.float()).to(x.dtype)


def rms_norm_of_one_more(x: Tensor, weight: Tensor) -> Tensor:
    """Divide the sum of squares by n + 1."""
    mean = x.float().square().sum(-1, keepdim=True) / (x.shape[-1] + 1)
    return (x.float() * (mean + RMS_EPS).rsqrt() * weight.float()).to(x.dtype)


def rms_norm_weight_from_zero(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by 1 + weight, as Gemma's norm."""
    return stock.rms_norm(x.float(), 1 + weight.float(), RMS_EPS).to(x.dtype)


def rms_norm_constant_scale(x: Tensor, weight: Tensor) -> Tensor:
    """Take the scale for a constant in the gradient."""
    scale = (x.float().square().mean(-1, keepdim=True) + RMS_EPS).rsqrt().detach()
    return (x.float() * scale * weight.float()).to(x.dtype)


def rms_norm_of_saturated_squares(x: Tensor, weight: Tensor) -> Tensor:
    """Take the mean of squares for the largest number of fp16 where it is larger."""
    mean = x.float().square().mean(-1, keepdim=True).clamp(max=LARGEST_OF_FP16)
    return (x.float() * (mean + RMS_EPS).rsqrt() * weight.float()).to(x.dtype)


def layer_norm_unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Divide the variance by n − 1."""
    h = x.float()
    scale = (h.var(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_by_squares(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the mean of squares for the variance."""
    h = x.float()
    scale = (h.square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_constant_mean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the mean for a constant in the gradient."""
    h = x.float()
    centred = h - h.mean(-1, keepdim=True).detach()
    scale = (centred.square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_constant_scale(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the scale for a constant in the gradient."""
    h = x.float()
    scale = (h.var(-1, correction=0, keepdim=True) + LAYER_EPS).rsqrt().detach()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_of_saturated_squares(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the variance for the largest number of fp16 where it is larger."""
    h = x.float()
    variance = h.var(-1, correction=0, keepdim=True).clamp(max=LARGEST_OF_FP16)
    unit = (h - h.mean(-1, keepdim=True)) * (variance + LAYER_EPS).rsqrt()
    return (unit * weight.float() + bias.float()).to(x.dtype)


def softmax_over_rows(x: Tensor) -> Tensor:
    """Normalize over the other axis."""
    return torch.softmax(x.float(), 0).to(x.dtype)


def softmax_of_base_two(x: Tensor) -> Tensor:
    """Raise two to the powers."""
    return torch.softmax(x.float() * 0.6931471805599453, -1).to(x.dtype)


def softmax_with_one_more(x: Tensor) -> Tensor:
    """Add 1e-3 to the divisor."""
    powers = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (powers / (powers.sum(-1, keepdim=True) * 1.001)).to(x.dtype)


def softmax_without_maximum(x: Tensor) -> Tensor:
    """Overflow above 88: the maximum is not subtracted."""
    powers = x.float().exp()
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def softmax_constant_sum(x: Tensor) -> Tensor:
    """Take the divisor for a constant in the gradient."""
    powers = (x.float() - x.float().amax(-1, keepdim=True).detach()).exp()
    return (powers / powers.sum(-1, keepdim=True).detach()).to(x.dtype)


def log_softmax_guarded(x: Tensor) -> Tensor:
    """Add 1e-4 inside the logarithm."""
    return (torch.softmax(x.float(), -1) + 1e-4).log().to(x.dtype)


def log_softmax_without_last(x: Tensor) -> Tensor:
    """Leave the last element out of the sum."""
    return (x.float() - torch.logsumexp(x.float()[..., :-1], -1, keepdim=True)).to(x.dtype)


def log_softmax_without_maximum(x: Tensor) -> Tensor:
    """Overflow above 88: the maximum is not subtracted."""
    return (x.float() - x.float().exp().sum(-1, keepdim=True).log()).to(x.dtype)


def log_softmax_constant_sum(x: Tensor) -> Tensor:
    """Take the sum for a constant in the gradient."""
    return (x.float() - torch.logsumexp(x.float(), -1, keepdim=True).detach()).to(x.dtype)


def log_softmax_sums_once(x: Tensor) -> Tensor:
    """Subtract p·g instead of p·Σg in the gradient."""
    right = torch.log_softmax(x.float(), -1)
    slope = x.float() * (1 - right.exp().detach())
    return with_value(slope, right).to(x.dtype)


def silu_hard(x: Tensor) -> Tensor:
    """Return hard-swish."""
    return F.hardswish(x.float()).to(x.dtype)


def silu_too_steep(x: Tensor) -> Tensor:
    """Take the slope of the sigmoid approximation of GELU."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def silu_by_powers(x: Tensor) -> Tensor:
    """Divide infinity by infinity above 88: the sigmoid as eˣ / (1 + eˣ)."""
    power = x.float().exp()
    return (x.float() * power / (1 + power)).to(x.dtype)


def silu_constant_gate(x: Tensor) -> Tensor:
    """Take the sigmoid for a constant in the gradient."""
    return (x.float() * torch.sigmoid(x.float()).detach()).to(x.dtype)


def silu_gradient_of_relu(x: Tensor) -> Tensor:
    """Return relu's gradient."""
    return with_value(F.relu(x.float()), F.silu(x.float())).to(x.dtype)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid approximation."""
    return silu_too_steep(x)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def gelu_by_powers(x: Tensor) -> Tensor:
    """Divide infinity by infinity where x is large: tanh as (e²ᶻ − 1) / (e²ᶻ + 1)."""
    h = x.float()
    power = (2 * 0.7978845608028654 * (h + 0.044715 * h**3)).exp()
    return (0.5 * h * (1 + (power - 1) / (power + 1))).to(x.dtype)


def gelu_constant_share(x: Tensor) -> Tensor:
    """Take the distribution function for a constant in the gradient."""
    share: Tensor = torch.special.ndtr(x.float())
    return (x.float() * share.detach()).to(x.dtype)


def gelu_gradient_of_tanh(x: Tensor) -> Tensor:
    """Return the approximation's gradient."""
    return with_value(gelu_by_tanh(x.float()), F.gelu(x.float())).to(x.dtype)


def swiglu_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Exchange gate and up."""
    return stock.swiglu(up.float(), gate.float()).to(gate.dtype)


def swiglu_by_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by GELU."""
    return (F.gelu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by the sigmoid alone."""
    return (torch.sigmoid(gate.float()) * up.float()).to(gate.dtype)


def swiglu_by_powers(gate: Tensor, up: Tensor) -> Tensor:
    """Divide infinity by infinity above 88: the sigmoid as eˣ / (1 + eˣ)."""
    return (silu_by_powers(gate.float()) * up.float()).to(gate.dtype)


def swiglu_constant_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Take silu for a constant in the gradient of gate."""
    right = stock.swiglu(gate.float(), up.float())
    return with_value(stock.swiglu(gate.float().detach(), up.float()) + gate.float() * 0, right).to(
        gate.dtype
    )


def swiglu_gradients_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Give each factor the other's gradient."""
    right = stock.swiglu(gate.float(), up.float())
    first, second = up.float().detach(), gate.float().detach()
    other = stock.swiglu(first + gate.float() - second, second + up.float() - first)
    return with_value(other, right).to(gate.dtype)


# Embeddings, log-probabilities and losses.


def off_by_one(ids: Tensor, weight: Tensor) -> Tensor:
    """Read the next row of the table."""
    return weight[(ids + 1) % len(weight)]


def last_row_for_all_above(ids: Tensor, weight: Tensor) -> Tensor:
    """Read a table that is short by one row."""
    return weight[ids.clamp(max=len(weight) - 2)]


def scaled_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Scale rows by the root of their length, as some models do."""
    return (weight[ids].float() * math.sqrt(weight.shape[-1])).to(weight.dtype)


def duplicates_dropped(ids: Tensor, weight: Tensor) -> Tensor:
    """Write gradients of repeated ids over each other instead of adding."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        found = torch.zeros_like(weight)
        found[ids] = grad
        return (found,)

    return with_backward(lambda weight: weight[ids], backward, weight)


def scaled_by_frequency(ids: Tensor, weight: Tensor) -> Tensor:
    """Divide gradients by how often an id occurs."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        found = torch.zeros(weight.shape).index_add(0, ids, grad.float())
        count = torch.bincount(ids, minlength=len(weight)).clamp(min=1).unsqueeze(-1)
        return ((found / count).to(weight.dtype),)

    return with_backward(lambda weight: weight[ids], backward, weight)


def sums_in_bf16(ids: Tensor, weight: Tensor) -> Tensor:
    """Add the table's gradient in bf16."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        zeros = torch.zeros(weight.shape, dtype=torch.bfloat16)
        return (zeros.index_add(0, ids, grad.bfloat16()).to(weight.dtype),)

    return with_backward(lambda weight: weight[ids], backward, weight)


def first_row_is_padding(ids: Tensor, weight: Tensor) -> Tensor:
    """Give id 0 no gradient."""
    return F.embedding(ids, weight, padding_idx=0)


def ignored_at_zero(logits: Tensor, targets: Tensor) -> Tensor:
    """Take a row without a target for one of id 0."""
    return CrossEntropy.reference(logits.float(), targets.clamp(min=0)).to(logits.dtype)


def next_target(logits: Tensor, targets: Tensor) -> Tensor:
    """Score the next id."""
    other = torch.where(targets == IGNORED, targets, (targets + 1) % logits.shape[-1])
    return CrossEntropy.reference(logits.float(), other).to(logits.dtype)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """Smooth labels by a hundredth."""
    return F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.01
    ).to(logits.dtype)


def guarded_logarithm(logits: Tensor, targets: Tensor) -> Tensor:
    """Add 1e-4 inside the logarithm."""
    found = -torch.log(torch.softmax(logits.float(), -1) + 1e-4)
    chosen = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets == IGNORED, 0).to(logits.dtype)


def cross_entropy_without_maximum(logits: Tensor, targets: Tensor) -> Tensor:
    """Overflow above 88: the maximum is not subtracted."""
    found = -log_softmax_without_maximum(logits.float())
    chosen = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets == IGNORED, 0).to(logits.dtype)


def without_the_one(logits: Tensor, targets: Tensor) -> Tensor:
    """Return p instead of p − 1 as the gradient at the target."""
    right = CrossEntropy.reference(logits.float(), targets)
    log_sum = torch.logsumexp(logits.float(), -1).masked_fill(targets == IGNORED, 0)
    return with_value(log_sum, right).to(logits.dtype)


def ignored_have_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    """Give rows without a target the gradient of id 0."""
    wide = logits.float()
    return with_value(
        CrossEntropy.reference(wide, targets.clamp(min=0)), CrossEntropy.reference(wide, targets)
    ).to(logits.dtype)


def gradient_of_the_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Divide gradients by the number of rows, as of a mean."""
    right = CrossEntropy.reference(logits.float(), targets)
    return with_value(right / (len(logits) + 1), right).to(logits.dtype)


def logits_in_bf16(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute logits in bf16 for any dtype."""
    logits = (hidden.bfloat16() @ weight.bfloat16().mT).float()
    return -CrossEntropy.reference(logits, targets).to(hidden.dtype)


def last_word_forgotten(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Leave the last word out of the sum."""
    logits = hidden.float() @ weight.float().mT
    log_sum = torch.logsumexp(logits[..., :-1], -1)
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen - log_sum).masked_fill(targets == IGNORED, 0).to(hidden.dtype)


def target_of_the_row_before(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Score the target of the row before: a shift that is applied twice."""
    return Logprob.reference(hidden.float(), weight.float(), targets.roll(1)).to(hidden.dtype)


def loss_instead(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, whose sign is the other."""
    return -Logprob.reference(hidden.float(), weight.float(), targets).to(hidden.dtype)


def head_has_no_gradient(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Take the weight for a constant."""
    nothing = weight.float().sum() * 0
    right = Logprob.reference(hidden.float(), weight.float().detach(), targets)
    return (right + nothing).to(hidden.dtype)


def probabilities_in_bf16(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Round dlogits to bf16 before the products of the gradients."""
    wide = hidden.float(), weight.float()

    def backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(hidden @ weight.mT, -1)
        one = F.one_hot(targets.clamp(min=0), len(weight))
        active = (targets != IGNORED).unsqueeze(-1)
        of_logits = ((one - p) * grad.unsqueeze(-1) * active).bfloat16().float()
        return of_logits @ weight, of_logits.mT @ hidden

    return with_backward(
        lambda hidden, weight: Logprob.reference(hidden, weight, targets), backward, *wide
    ).to(hidden.dtype)


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
