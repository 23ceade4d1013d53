"""Flash attention in Triton: a causal prefill with an online softmax, and a decode that splits the keys.

A row of the certificate is a sequence of the batch.

    isobit certify examples/certify/flash_attention.py:prefill --rows 1,3
    isobit certify examples/certify/flash_attention.py:split_by_batch --rows 1,3,20
"""

import math

import torch
import triton
import triton.language as tl

DEPTH = 64  # of one head
QUERIES = 64  # tokens of a sequence in prefill
KEYS = 256  # tokens in the cache in decode


@triton.jit
def prefill_kernel(
    q,  # [batch, tokens, DEPTH]
    k,  # [batch, tokens, DEPTH]
    v,  # [batch, tokens, DEPTH]
    out,  # [batch, tokens, DEPTH]
    tokens,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_M
    shift = tl.program_id(1) * tokens * DEPTH  # to this sequence
    rows = first + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, DEPTH)
    at = shift + rows[:, None] * DEPTH + depth[None, :]
    queries = tl.load(q + at, mask=rows[:, None] < tokens, other=0.0)  # [BLOCK_M, DEPTH]
    highest = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, DEPTH), dtype=tl.float32)
    # Query i sees keys 0 to i, so a tile needs no block that starts after its last query.
    for start in range(0, tl.minimum(first + BLOCK_M, tokens), BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        here = shift + columns[:, None] * DEPTH + depth[None, :]
        keys = tl.load(k + here, mask=columns[:, None] < tokens, other=0.0)  # [BLOCK_N, DEPTH]
        scores = tl.dot(queries, tl.trans(keys)) * scale  # [BLOCK_M, BLOCK_N]
        scores = tl.where(rows[:, None] >= columns[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weights, axis=1)
        values = tl.load(v + here, mask=columns[:, None] < tokens, other=0.0)
        acc = tl.dot(weights.to(v.dtype.element_ty), values, acc * rescale[:, None])
        highest = higher
    acc = acc / total[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit
def decode_kernel(
    q,  # [batch, DEPTH]: one query per sequence
    k,  # [batch, n_keys, DEPTH]
    v,  # [batch, n_keys, DEPTH]
    parts,  # [batch, splits, DEPTH]: sums that are not yet divided
    tops,  # [batch, splits]: their maxima
    totals,  # [batch, splits]: their denominators
    n_keys,
    scale,
    PART: tl.constexpr,  # keys of one split
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
):
    sequence, split = tl.program_id(0), tl.program_id(1)
    depth = tl.arange(0, DEPTH)
    query = tl.load(q + sequence * DEPTH + depth).to(tl.float32)
    highest = -float("inf")
    total = 0.0
    acc = tl.zeros((DEPTH,), dtype=tl.float32)
    for start in range(0, PART, BLOCK_N):
        columns = split * PART + start + tl.arange(0, BLOCK_N)
        here = (sequence * n_keys + columns[:, None]) * DEPTH + depth[None, :]
        keys = tl.load(k + here).to(tl.float32)  # [BLOCK_N, DEPTH]
        scores = tl.sum(keys * query[None, :], axis=1) * scale  # [BLOCK_N]
        higher = tl.maximum(highest, tl.max(scores, axis=0))
        weights = tl.exp2(scores - higher)
        rescale = tl.exp2(highest - higher)
        total = total * rescale + tl.sum(weights, axis=0)
        values = tl.load(v + here).to(tl.float32)
        acc = acc * rescale + tl.sum(values * weights[:, None], axis=0)
        highest = higher
    at = sequence * tl.num_programs(1) + split
    tl.store(parts + at * DEPTH + depth, acc)
    tl.store(tops + at, highest)
    tl.store(totals + at, total)


@triton.jit
def combine_kernel(parts, tops, totals, out, SPLITS: tl.constexpr, DEPTH: tl.constexpr):
    sequence = tl.program_id(0)
    depth = tl.arange(0, DEPTH)
    first = sequence * SPLITS
    highest = tl.load(tops + first)
    for split in range(1, SPLITS):
        highest = tl.maximum(highest, tl.load(tops + first + split))
    acc = tl.zeros((DEPTH,), dtype=tl.float32)
    total = 0.0
    for split in range(SPLITS):
        rescale = tl.exp2(tl.load(tops + first + split) - highest)
        acc += tl.load(parts + (first + split) * DEPTH + depth) * rescale
        total += tl.load(totals + first + split) * rescale
    tl.store(out + sequence * DEPTH + depth, (acc / total).to(out.dtype.element_ty))


def attend(q, k, v, block_m, block_n, num_warps=4):
    """Return causal attention of one head for a batch of sequences of equal length."""
    out = torch.empty_like(q)
    batch, tokens, depth = q.shape
    scale = math.log2(math.e) / math.sqrt(depth)
    grid = (triton.cdiv(tokens, block_m), batch)
    prefill_kernel[grid](q, k, v, out, tokens, scale, block_m, block_n, depth, num_warps=num_warps)
    return out


def decode(q, k, v, splits, block_n=64):
    """Return attention of one query per sequence, with the keys in equal splits."""
    batch, n_keys, depth = k.shape
    out = torch.empty_like(q)
    parts = torch.empty((batch, splits, depth), dtype=torch.float32, device=q.device)
    tops = torch.empty((batch, splits), dtype=torch.float32, device=q.device)
    totals = torch.empty((batch, splits), dtype=torch.float32, device=q.device)
    scale = math.log2(math.e) / math.sqrt(depth)
    decode_kernel[(batch, splits)](
        q, k, v, parts, tops, totals, n_keys, scale, n_keys // splits, block_n, depth
    )
    combine_kernel[(batch,)](parts, tops, totals, out, splits, depth)
    return out


def tensors(*shapes):
    """Return inputs of some shapes. Their values do not matter: every float is a symbol."""
    return tuple(torch.randn(shape).to(torch.bfloat16) for shape in shapes)


def prefill(rows, BLOCK_M=32, BLOCK_N=32, num_warps=4):
    """Certify a prefill: does the tile change a sequence's result?"""
    return attend(*tensors(*[(rows, QUERIES, DEPTH)] * 3), BLOCK_M, BLOCK_N, num_warps)


def split_by_batch(rows):
    """Certify a decode that splits the keys to fill the GPU: more splits for a smaller batch."""
    splits = 4 if rows <= 2 else 2 if rows <= 16 else 1
    return decode(*tensors((rows, DEPTH), (rows, KEYS, DEPTH), (rows, KEYS, DEPTH)), splits)


def split_by_length(rows):
    """Certify a decode with one split per 128 keys, whatever the batch."""
    return decode(*tensors((rows, DEPTH), (rows, KEYS, DEPTH), (rows, KEYS, DEPTH)), KEYS // 128)
