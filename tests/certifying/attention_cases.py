"""The kernels of attention as cases: see cases.py."""

import math

import numpy as np
import torch

from isobit.ops.attention import triton_backward, triton_forward
from isobit.ops.attention.tiles import tile_of
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK
from tests.certifying.cases import Case, empty, execute, matrix_instruction, patterns
from tests.certifying.plan.attention import Head, Seen
from tests.certifying.plan.attention_backward import HeadGrads
from tests.certifying.running import Launch, draw, raw


def attend_heads(plan, given, padded, zero, how):
    """Return the plan of every head: q [queries, heads, depth], k and v [keys, key heads, depth]."""
    beyond = ((0, 0), (0, 0), (0, padded - given["q"].shape[2]))  # kernels multiply zeros there
    q, k = (np.pad(given[name], beyond, constant_values=zero) for name in "qk")
    group, v = q.shape[1] // k.shape[1], given["v"]
    heads = (
        Head(plan, q[:, h], k[:, h // group], v[:, h // group], *how) for h in range(q.shape[1])
    )
    return np.stack([head.attend() for head in heads], 1)


def limits_of(keys, causal, window, size=0):
    """Return how many keys before and after its own a query sees, and the size of its chunk: all, unless limited."""
    before = window - 1 if window else keys
    return {"before": before, "after": 0 if causal else before, "size": size or keys}


def seen_by(queries, keys, before, after, size):
    """Return the keys that each of the last queries of a sample sees."""
    position = keys - queries + np.arange(queries)
    begin = np.maximum(position - before, position // size * size)
    return Seen(begin, np.minimum(position + 1 + after, keys))


def attention_case(
    dtype,
    queries,
    keys,
    key_heads=1,
    group=2,
    depth=16,
    tile=16,
    form="fold",
    chunk=ATTENTION_CHUNK,
    causal=True,
    window=0,
    size=0,
):
    """The last `queries` of a sample of `keys`; form "fold" for one program per tile, "chunks" for split-KV.

    Names are of the kernels without GUARD, whose branch on values is refused; see triton_forward.py.
    """
    q = draw(keys, key_heads * group, depth, dtype=dtype, seed=6, spread=1)[keys - queries :]
    k, v = (draw(keys, key_heads, depth, dtype=dtype, seed=seed, spread=1) for seed in (7, 8))
    y, scale = empty(*q.shape, dtype=dtype), float(np.float32(depth**-0.5))
    lse = empty(*q.shape[:2])
    spans, lengths = torch.tensor([[0, queries]]), torch.tensor([keys])
    blocks = torch.arange(0, keys, ATTENTION_BLOCK)
    constants = {
        "KEY_HEADS": key_heads,
        "GROUP": group,
        "DEPTH": depth,
        "PADDED": 1 << (depth - 1).bit_length(),
        "CHUNK": chunk,
        "ROWS": tile,
        "tiles": math.ceil(queries * group / tile),
        **limits_of(keys, causal, window, size),
        "spans": spans,
        "lengths": lengths,
    }
    grid = (constants["tiles"], key_heads)
    given = {"q": q, "k": k, "v": v, "blocks": blocks, "table": len(blocks), "scale": scale}
    given |= {"GUARD": False, "cap": 0.0, "CAPPED": False, **constants}
    count, scratch = math.ceil(keys / chunk), (lse,)
    if form == "fold":
        launches = (Launch(triton_forward.attention, grid, {**given, "y": y, "lse": lse}, {}),)
    else:
        heads = queries * key_heads * group
        scratch = (empty(count, heads), empty(count, heads), empty(count, heads, depth), lse)
        partial = dict(zip(("most_of", "total_of", "output_of"), scratch, strict=False))
        merging = {**partial, "y": y, "lse": lse, "heads": heads, **constants}
        given |= {**partial, "heads": heads}
        launches = (
            Launch(triton_forward.attention_chunks, (*grid, count), given, {}),
            Launch(triton_forward.merge_chunks, grid, merging, {}),
        )

    def expected(plan, given):
        seen = seen_by(queries, keys, **limits_of(keys, causal, window, size))
        zero = plan.on.constant(0.0) if dtype == "f32" else plan.on.constant16(0)
        return attend_heads(plan, given, constants["PADDED"], zero, (seen, scale, chunk))

    return Case(
        "attention", dtype, form, f"{tile} rows", count, {"q": q, "k": k, "v": v}, y, launches, expected,
        None, scratch,
    )  # fmt: skip


def layout_of_one_sample(count, group, depth, causal, window, size):
    """Return the arguments that say where the keys of a sample are, and which of them a query sees."""
    blocks = torch.arange(0, count, ATTENTION_BLOCK)
    return {
        "spans": torch.tensor([[0, count]]),
        "blocks": blocks,
        "lengths": torch.tensor([count]),
        "table": len(blocks),
        **limits_of(count, causal, window, size),
        "cap": 0.0,
        "CAPPED": False,
        "KEY_HEADS": 1,
        "GROUP": group,
        "DEPTH": depth,
        "PADDED": depth,
    }


def shipped_options(q):
    """The warps and stages of a gradient's tile, by target: with others, code for sm_100 may have races."""

    def options(target):
        tile = tile_of("gradient", q.dtype, target, q.element_size() * q.shape[-1])
        return {"num_warps": tile.warps, "num_stages": tile.stages}

    return options


def attention_grads_case(
    dtype, count, output="dq", group=1, depth=16, tile=16, causal=True, window=0, size=0
):
    """The gradient of queries or keys ("dq", "dk" or "dv") of one sample and one key head."""
    q, grad, out = (
        draw(count, group, depth, dtype=dtype, seed=seed, spread=1) for seed in (6, 9, 11)
    )
    k, v = (draw(count, 1, depth, dtype=dtype, seed=seed, spread=1) for seed in (7, 8))
    lse, dots, scale = draw(count, group, dtype="f32", seed=12), empty(count, group), 0.25
    made = {"dq": empty(*q.shape, dtype=dtype)}
    if output != "dq":
        made = {name: empty(*k.shape, dtype=dtype) for name in ("dk", "dv")}
    tiles = math.ceil(count / tile)
    inputs = {"grad": grad, "q": q, "k": k, "v": v, "lse": lse}
    given = {**inputs, **made, "dots": dots, "tiles": tiles, "scale": scale, "ROWS": tile}
    given |= layout_of_one_sample(count, group, depth, causal, window, size)
    heads = {"heads": count * group, "DEPTH": depth, "ROWS": 16}
    kernel = getattr(
        triton_backward, "differentiate_queries" if output == "dq" else "differentiate_keys"
    )
    launches = (
        Launch(
            triton_backward.dot_heads,
            (math.ceil(count * group / 16),),
            {"grad": grad, "y": out, "dots": dots, **heads},
            {},
        ),
        Launch(kernel, (tiles, group if output == "dq" else 1), given, shipped_options(q)),
    )

    def expected(plan, given):
        seen = seen_by(count, count, **limits_of(count, causal, window, size))
        sums = [plan.full((count, depth), 0.0)] * 2
        queries = []
        for h in range(group):
            head = HeadGrads(
                plan,
                given["grad"][:, h],
                given["q"][:, h],
                given["k"][:, 0],
                given["v"][:, 0],
                given["y"][:, h],
                given["lse"][:, h],
                seen,
                scale,
            )
            if output == "dq":
                queries.append(head.result(head.query_grads()))
            else:
                sums = head.add_key_grads(*sums)
        if output == "dq":
            return np.stack(queries, 1)
        return head.result(sums[output == "dv"])[:, None]

    return Case(
        "attention gradient", dtype, output, f"{tile} rows", 1, {**inputs, "y": out}, made[output], launches,
        expected, None, (dots, *made.values()),
    )  # fmt: skip


def decode_against_prefill(target, form, decode_chunk=128):
    """Compare the last 5 queries of a sample, computed alone by a decode tile, with those of a prefill tile.

    Returns the matrix instructions of both, the number of outputs, and how many names and bits differ.
    """
    queries, prefilled, keys = 5, 40, 200
    decode = attention_case("bf16", queries, keys, chunk=decode_chunk, form=form)
    prefill = attention_case("bf16", prefilled, keys, chunk=128, tile=64)
    (one, _), (many, _) = execute(decode, target), execute(prefill, target)
    last = slice(prefilled - queries, None)
    alone, inside = one.names_of(decode.output), many.names_of(prefill.output)[last]
    bits = patterns(raw(decode.output)) != patterns(raw(prefill.output))[last]
    return (
        (matrix_instruction(one.opcodes), matrix_instruction(many.opcodes)),
        alone.size,
        int((alone != inside).sum()),
        int(bits.sum()),
    )
