"""Parts of attention's kernels that are wrong: each adds in another order, or rounds otherwise."""

import triton
import triton.language as tl

from isobit.ops.attention import triton_backward, triton_forward
from isobit.ops.gpu.elementary import exp_nonpositive, tanh
from isobit.ops.gpu.sums import fresh_dot, merge_columns


@triton.jit
def other_lanes(weights, ROWS: tl.constexpr):
    """16 blocks of four keys instead of 16 interleaved lanes."""
    quarters = tl.reshape(weights, (ROWS, 16, 2, 2))
    even, odd = tl.split(quarters)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return merge_columns((((0.0 + first) + second) + third) + fourth, ROWS, 16)


@triton.jit
def dot_in_halves(a, b):
    """Two runs of products, then their sum."""
    HALF: tl.constexpr = a.shape[1] // 2
    first = (tl.arange(0, a.shape[1]) < HALF)[None, :]
    left = fresh_dot(tl.where(first, a, 0.0), b)
    return left + fresh_dot(tl.where(first, 0.0, a), b)


@triton.jit
def merge_without_rescaling_the_first(
    most,
    total,
    output,
    later_most,
    later_total,
    later_output,
    start,
    begin,
    end,
    CHUNK: tl.constexpr,
):
    """The state of the first chunk is the base, whatever the maxima are: right in exact numbers only."""
    base = tl.where(begin < start, most, later_most)
    right = exp_nonpositive(later_most - base)
    right = tl.where(later_most > base, tl.div_rn(1.0, exp_nonpositive(base - later_most)), right)
    seen = (start < end) & (start + CHUNK > begin)
    return (
        tl.where(seen, base, most),
        tl.where(seen, total + later_total * right, total),
        tl.where(seen, output + later_output * right, output),
    )


@triton.jit
def fused_exponential(x):
    """The chain of exp with one fused multiply-add."""
    y = exp_nonpositive(x)
    r = tl.math.fma(y, y * 0.0 + 1.0000001, y * 0.0)
    return tl.where(x < -0.5, r, y)


@triton.jit
def unscaled_last(products, weight_grads, lse, dots, seen, scale, cap, CAPPED: tl.constexpr):
    """The scale is multiplied into the difference first."""
    weights = tl.where(seen, exp_nonpositive(products * scale - lse), 0.0)
    return weights, tl.where(seen, weights * ((weight_grads - dots) * scale), 0.0)


@triton.jit
def cap_by_reciprocal(x, cap):
    """x times the reciprocal of the cap, which rounds twice, instead of the quotient."""
    bent = tanh(x * tl.div_rn(1.0, cap))
    return bent * cap, 1.0 - bent * bent


@triton.jit
def cap_with_factored_slope(x, cap):
    """The slope as a product of two factors instead of a difference."""
    bent = tanh(tl.div_rn(x, cap))
    return bent * cap, (1.0 - bent) * (1.0 + bent)


@triton.jit
def chunks_of_the_call(query, query_count, key_count, mask):
    """Chunks that begin where the queries of a call do, instead of at positions of the sample."""
    before, after, size = mask
    position = key_count - query_count + query
    first = key_count - query_count + query // size * size
    return tl.maximum(position - before, first), tl.minimum(position + 1 + after, key_count)


@triton.jit
def one_key_more(query, query_count, key_count, mask):
    """A window that counts the keys before a query's own."""
    before, after, size = mask
    position = key_count - query_count + query
    begin = tl.maximum(position - before - 1, position // size * size)
    return begin, tl.minimum(position + 1 + after, key_count)


@triton.jit
def one_side(query, query_count, key_count, mask):
    """A window of both sides of which the later one is not seen."""
    before, after, size = mask
    position = key_count - query_count + query
    return tl.maximum(position - before, position // size * size), position + 1 + 0 * after


# what it changes -> (options of the call, module, name, replacement)
BOTH_SIDES = {"is_causal": False, "window": 20}
CHUNKED, CAPPED = {"is_causal": True, "chunk_size": 24}, {"is_causal": True, "softcap": 1.7}
MASKS = {
    "quotient of the cap": (CAPPED, triton_forward, "soft_cap", cap_by_reciprocal),
    "slope of the cap": (CAPPED, triton_backward, "soft_cap", cap_with_factored_slope),
    "chunks": (CHUNKED, triton_forward, "visible_keys", chunks_of_the_call),
    "keys before": (BOTH_SIDES, triton_forward, "visible_keys", one_key_more),
    "keys after": (BOTH_SIDES, triton_backward, "visible_keys", one_side),
}
# what it changes -> (module, name, replacement)
FORWARD = {
    "lanes of the sum of weights": (triton_forward, "add_lanes", other_lanes),
    "runs of products": (triton_forward, "fresh_dot", dot_in_halves),
    "merge of chunks": (triton_forward, "merge_states", merge_without_rescaling_the_first),
    "exponential": (triton_forward, "exp_nonpositive", fused_exponential),
}
BACKWARD = {
    "runs of products": (triton_backward, "fresh_dot", dot_in_halves),
    "order of factors": (triton_backward, "differentiate_scores", unscaled_last),
    "exponential": (triton_backward, "exp_nonpositive", fused_exponential),
}
