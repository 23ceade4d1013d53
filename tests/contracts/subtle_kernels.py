"""RMS norms and a softmax with one subtle fault each, and a few that are right although they look odd."""

import torch

EPS = 1e-6
calls, statistics = [0], {}


def norm(x, weight, dtype=torch.float32):
    """Compute what a right kernel does."""
    y = x.to(dtype).contiguous()
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return (y * scale * weight.to(dtype)).to(x.dtype)


def scaled_by(x, total, weight):
    return (x.float() * torch.rsqrt(total + EPS) * weight.float()).to(x.dtype)


# ---- right --------------------------------------------------------------------------------------


def in_fp64(x, weight):
    return norm(x, weight, torch.float64)


def without_negative_zeros(x, weight):
    return norm(x, weight) + 0.0


# ---- wrong --------------------------------------------------------------------------------------


def wide_rows(x, weight):
    """Wrong above 4,096 columns, as a loop over blocks may be."""
    return norm(x, weight) * (1.01 if x.shape[-1] > 4096 else 1)


def many_rows(x, weight):
    """Wrong from 1,000 rows on, as an overflowing grid may be."""
    return norm(x, weight) * (1.01 if len(x) >= 1000 else 1)


def once_in_fifty(x, weight):
    calls[0] += 1
    return norm(x, weight) * (1.01 if calls[0] % 50 == 0 else 1)


def kept_by_address(x, weight):
    key = x.data_ptr(), tuple(x.shape)
    if key not in statistics:
        statistics[key] = x.float().square().mean(-1, keepdim=True)
    return scaled_by(x, statistics[key], weight)


def split_by_rows(x, weight):
    """Split the sum into eight parts if there are few rows."""
    parts = x.float().chunk(8 if len(x) < 16 else 1, -1)
    return scaled_by(x, sum(p.square().sum(-1, keepdim=True) for p in parts) / x.shape[-1], weight)


def split_by_threads(x, weight):
    parts = x.float().contiguous().chunk(torch.get_num_threads(), -1)
    return scaled_by(x, sum(p.square().sum(-1, keepdim=True) for p in parts) / x.shape[-1], weight)


def pairs_of_rows(x, weight):
    """The last row is off by an ulp if the number of rows is even and above 64."""
    y = norm(x, weight)
    if len(x) > 64 and len(x) % 2 == 0:
        y = torch.cat([y[:-1], norm(x[-1:] * 1.0000001, weight)])
    return y


def without_the_tail(x, weight):
    """Leave the columns behind the last multiple of 8 out of the mean."""
    kept = x.shape[-1] // 8 * 8 or x.shape[-1]
    total = x.float().contiguous()[..., :kept].square().sum(-1, keepdim=True) / x.shape[-1]
    return scaled_by(x, total, weight)


def of_contiguous_memory(x, weight):
    """Ignore the strides of x."""
    if x.is_contiguous():
        return norm(x, weight)
    return norm(x.as_strided(x.shape, (x.shape[-1], 1)), weight)


def in_training(x, weight):
    return norm(x, weight) * (1.01 if torch.is_grad_enabled() and x.requires_grad else 1)


def hides_nan(x, weight):
    return torch.nan_to_num(norm(x, weight), 0.0)


def leaks_nan(x, weight):
    """Multiply by a mask of zeros."""
    y = norm(x, weight)
    return y + 0 * y.sum(0, keepdim=True)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return norm(x, weight)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            of_x, of_weight = torch.autograd.grad(norm(*leaves), leaves, grad)
        return of_x * (1 if len(of_x) < 5 else 1.0001), of_weight


def gradient_by_batch(x, weight):
    return WrongBackward.apply(x, weight)


def softmax_of_chunks(x):
    """Add chunks of 128 in the dtype of x: in bf16 and at a vocabulary the sum is wrong by some percent."""
    powers = (x - x.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(powers[..., :1])
    for part in powers.split(128, -1):
        total = total + part.float().sum(-1, keepdim=True).to(x.dtype)
    return powers / total


def softmax_of_chunks_in_fp32(x):
    """Right: the chunks are added in fp32."""
    return softmax_of_chunks(x.float().contiguous()).to(x.dtype)


def softmax_without_maximum(x):
    """Divide infinity by infinity where a logit is above 88."""
    powers = x.float().contiguous().exp()
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def silu_by_powers(x):
    """Divide infinity by infinity above 88."""
    power = x.float().exp()
    return (x.float() * power / (1 + power)).to(x.dtype)


def mean_in_fp16(x, weight):
    """Keep the mean of squares in the dtype of x: in fp16 it is infinite where x is above 256."""
    h = x.float().contiguous()
    mean = h.square().mean(-1, keepdim=True).to(x.dtype).float()
    return (h * torch.rsqrt(mean + 1e-6) * weight.float()).to(x.dtype)
