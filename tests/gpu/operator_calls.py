"""Calls of every operator that has a Triton executor, and the comparison of its bits with the CPU's executor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import isobit
from isobit.ops.attesting import special_values, wide_values
from isobit.ops.delta_rule.gates import decay_gate, sigmoid_gate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGETS = ["sm_80", "sm_90", "sm_100"]
HARD_SUMS = [
    [],
    [-0.0, -0.0],
    [1.0, 2.0**-24, 2.0**-149],
    [1.0, 2.0**-24],
    [2.0**100, 1.0, -(2.0**100), 2.0**-100],
    [2.0**-149] * 3,
    [3.4028234663852886e38, 2.0**103],
    [-1.0, -(2.0**-24), -(2.0**-140)],
    [-torch.inf, -3.0],
    [torch.inf, -torch.inf],
    [torch.nan, torch.inf],
]


@dataclass(frozen=True)
class Call:
    """A function of tensors that all have gradients."""

    function: Callable
    tensors: tuple

    def results(self):
        """Return the output, then the gradients."""
        given = [t.detach().clone().requires_grad_() for t in self.tensors]
        y = self.function(*given)
        generator = torch.Generator().manual_seed(7)
        upstream = wide_values(tuple(y.shape), y.dtype, generator)
        return [y.detach(), *torch.autograd.grad(y, given, upstream)]


def generator_of(dtype):
    return torch.Generator().manual_seed(DTYPES.index(dtype))


def special_rows(rows, n, dtype):
    """Rows of which some have NaN, infinities, zeros of both signs, or nothing but -inf."""
    x = wide_values((rows, n), dtype, generator_of(dtype))
    x[:1, n // 2 :] = -0.0
    if rows > 5:
        x[1, n - 1] = torch.nan
        x[2, 0] = torch.inf
        x[3] = -torch.inf
        x[4, : n // 2] = -torch.inf
        x[5] *= 2.0**-14 if dtype == torch.float16 else 2.0**-130  # subnormals
    return x


def row_calls(name, dtype, shapes):
    """Divided so that many terms of a sum of exponentials count."""
    function = getattr(isobit, name)
    return [Call(function, (special_rows(*shape, dtype) / 64,)) for shape in shapes]


def norm_calls(name, dtype, shapes):
    """Shapes are (rows, n, lengths of samples or None)."""
    generator, function = generator_of(dtype), getattr(isobit, name)
    calls = []
    for rows, n, lengths in shapes:
        x = (
            special_rows(rows, n, dtype)
            if lengths is None
            else wide_values((rows, n), dtype, generator)
        )
        samples = isobit.Samples.packed(lengths) if lengths else None
        parameters = [
            wide_values((n,), dtype, generator) for _ in range(1 + (name == "layer_norm"))
        ]

        def call(*given, samples=samples):
            return function(*given, samples=samples)

        calls.append(Call(call, (x, *parameters)))
    return calls


def head_calls(dtype, shapes):
    generator = generator_of(dtype)
    return [
        Call(
            lambda x, w: isobit.rms_norm(x, w, heads=True),
            (wide_values(shape, dtype, generator), wide_values(shape[-1:], dtype, generator)),
        )
        for shape in shapes
    ]


def offset_calls(dtype, shapes):
    """Norms that multiply by 1 + weight."""
    generator = generator_of(dtype)
    return [
        Call(
            lambda x, w: isobit.rms_norm(x, w, offset=1.0),
            (wide_values(shape, dtype, generator), wide_values(shape[-1:], dtype, generator)),
        )
        for shape in shapes
    ]


def element_calls(name, dtype, sizes):
    generator, calls = generator_of(dtype), []
    for rows, columns in sizes:
        x = special_values((rows, columns), dtype, generator)
        if name == "swiglu":
            calls.append(Call(isobit.swiglu, (x, wide_values((rows, columns), dtype, generator))))
            calls.append(Call(isobit.swiglu, (x.flip(0), x)))
        elif name == "gelu by tanh":
            calls.append(Call(lambda x: isobit.gelu(x, "tanh"), (x,)))
        else:
            calls.append(Call(getattr(isobit, name), (x,)))
    return calls


def rotary_calls(dtype, shapes):
    """Shapes are (x, angles)."""
    generator, calls = generator_of(dtype), []
    for shape, angles in shapes:
        for kind in (torch.float32, dtype):
            cos, sin = (wide_values(angles, kind, generator) for _ in range(2))
            x = wide_values(shape, dtype, generator)
            calls.append(Call(lambda x, cos=cos, sin=sin: isobit.rotary(x, cos, sin), (x,)))
    return calls


def embedding_calls(dtype, shapes):
    """Shapes are (ids, rows, width, lengths of samples or None, padding)."""
    generator, calls = generator_of(dtype), []
    for shape, rows, width, lengths, padding in shapes:
        ids = torch.randint(0, rows - 2, shape, generator=generator)
        samples = isobit.Samples.packed(lengths) if lengths else None

        def call(w, ids=ids, samples=samples, padding=padding):
            return isobit.embedding(ids, w, samples=samples, padding_idx=padding)

        calls.append(Call(call, (wide_values((rows, width), dtype, generator),)))
    return calls


def with_specials(x):
    """Write NaN, an infinity and a negative zero into a tensor of at least three elements."""
    x.view(-1)[:3] = torch.tensor([torch.nan, -torch.inf, -0.0])
    return x


def selection_calls(dtype, shapes):
    """Shapes are (x, chosen rows)."""
    generator, calls = generator_of(dtype), []
    for shape, chosen in shapes:
        rows = torch.tensor(chosen, dtype=torch.int64)
        x = with_specials(wide_values(shape, dtype, generator))
        calls.append(Call(lambda x, rows=rows: isobit.select_rows(x, rows), (x,)))
    return calls


def convolution_calls(dtype, shapes):
    """Shapes are (x, taps, lengths of samples or None, whether they go on behind a cache)."""
    generator, calls = generator_of(dtype), []
    for shape, taps, lengths, cached in shapes:
        samples = isobit.Samples.packed(lengths) if lengths else None
        count = len(lengths) if lengths else torch.Size(shape[:-2]).numel()
        before = (count, taps - 1, shape[-1])
        before = wide_values(before, dtype, generator) if cached else None

        def call(x, weight, samples=samples, before=before):
            return isobit.causal_conv(x, weight, samples=samples, before=before)

        x = with_specials(wide_values(shape, dtype, generator))
        calls.append(Call(call, (x, wide_values((shape[-1], 1, taps), dtype, generator))))
    return calls


def route_calls(dtype, shapes):
    """Shapes are (experts, k, score, normalize, scale, groups, top groups, whether there is a bias).

    Rows are ties, numbers that are not finite, zeros of both signs, and padding. Ids are compared as numbers.
    """
    generator, calls = generator_of(dtype), []
    for count, k, score, normalize, scale, groups, top_groups, has_bias in shapes:
        logits = wide_values((9, count), dtype, generator)
        logits[1] = logits[1, :1]
        logits[2, :3] = torch.tensor([torch.nan, -torch.inf, torch.inf])
        logits[3], logits[3, ::2], logits[5] = 0.0, -0.0, -torch.inf
        how = {"score": score, "normalize": normalize, "scale": scale, "groups": groups}
        how |= {"top_groups": top_groups, "samples": isobit.Samples(((0, 4), (5, 4)), 9, 0, 2)}
        how |= {"bias": wide_values((count,), torch.float32, generator) if has_bias else None}

        def call(x, k=k, how=how):
            found = isobit.route(x, k, **how)
            ids = (found.experts, found.places, found.tokens[: 9 * k].view(-1, k))
            return torch.cat([found.weights, *(t.float() for t in ids)])

        calls.append(Call(call, (logits,)))
    return calls


def expert_calls(dtype, shapes):
    """Dispatch and combine rows with given weights; shapes are (tokens, experts, k, width)."""
    generator, calls = generator_of(dtype), []
    for tokens, count, k, width in shapes:
        ids = [torch.randperm(count, generator=generator)[:k] for _ in range(tokens)]
        ids = torch.stack(ids) if ids else torch.zeros(0, k, dtype=torch.int64)
        ids[:1] = count  # the first token goes nowhere, the second to one expert less
        ids[1:2, :1] = count
        samples = isobit.Samples.packed([tokens]) if tokens else None

        def call(x, weights, ids=ids, count=count, samples=samples):
            routes = isobit.Routes.chosen(ids, weights, total=count, samples=samples)
            return isobit.combine(isobit.dispatch_rows(x, routes), routes)

        weights = wide_values((tokens, k), torch.float32, generator)
        x = wide_values((tokens, width), dtype, generator)
        calls.append(Call(call, (with_specials(x) if tokens else x, weights)))
    return calls


def product_calls(shapes):
    """Linear layers of experts in fp32; shapes are (lengths of samples, experts, k, K, N, transposed)."""
    generator, calls = generator_of(torch.float32), []
    for lengths, count, k, width, outputs, transposed in shapes:
        samples = isobit.Samples.packed(lengths)
        ids = torch.randint(0, count - 1, (samples.rows, 1), generator=generator)
        ids = (ids + torch.arange(k)) % (count - 1)  # the last expert has no rows
        routes = isobit.Routes.chosen(ids, torch.ones(ids.shape), total=count, samples=samples)
        shape = (count, width, outputs) if transposed else (count, outputs, width)
        given = [(len(routes.tokens), width), shape, (count, outputs)]

        def call(*tensors, routes=routes, transposed=transposed):
            return isobit.grouped_linear(*tensors, routes=routes, transposed=transposed)

        tensors = (wide_values(size, torch.float32, generator) for size in given)
        calls.append(Call(call, tuple(tensors)))
    return calls


def gate_calls(dtype):
    generator, samples = generator_of(dtype), isobit.Samples.packed([3, 0, 9])
    a = special_values((12, 81), dtype, generator)
    heads = [wide_values((81,), dtype, generator) for _ in range(2)]
    return [
        Call(sigmoid_gate, (a,)),
        Call(lambda *given: decay_gate(*given, samples=samples), (a, *heads)),
    ]


def sum_calls(dtype, sizes, hard):
    generator = generator_of(dtype)
    tensors = [wide_values((size,), dtype, generator) for size in sizes]
    tensors += [torch.tensor(values, dtype=torch.float32).to(dtype) for values in hard]
    return [Call(isobit.exact_sum, (x,)) for x in tensors]


# Small calls are for the PTX machine: two segments with tails; two leaves of tokens, and a tree over samples.
SMALL = {
    "rms_norm": lambda d: norm_calls("rms_norm", d, [(2, 530, None), (270, 3, [258, 0, 7, 5])]),
    "rms_norm over heads": lambda d: head_calls(d, [(2, 3, 6, 20)]),
    "rms_norm with an offset": lambda d: offset_calls(d, [(2, 3, 70)]),
    "layer_norm": lambda d: norm_calls("layer_norm", d, [(2, 530, None), (270, 3, [258, 0, 7, 5])]),
    "softmax": lambda d: row_calls("softmax", d, [(6, 530)]),
    "log_softmax": lambda d: row_calls("log_softmax", d, [(6, 530)]),
    "silu": lambda d: element_calls("silu", d, [(2, 81)]),
    "gelu": lambda d: element_calls("gelu", d, [(2, 81)]),
    "gelu by tanh": lambda d: element_calls("gelu by tanh", d, [(2, 81)]),
    "swiglu": lambda d: element_calls("swiglu", d, [(2, 81)])[:1],
    "rotary": lambda d: rotary_calls(d, [((2, 5, 3, 10), (5, 10))]),
    "embedding": lambda d: embedding_calls(d, [((290,), 9, 5, [258, 0, 20, 12], 2)]),
    "select_rows": lambda d: selection_calls(d, [((2, 9, 33), [17, 0, 4])]),
    "causal_conv": lambda d: convolution_calls(d, [((9, 5), 4, [5, 0, 4], True)]),
    "experts by routes": lambda d: route_calls(d, [(12, 3, "sigmoid", True, 2.5, 4, 2, True)]),
    "experts of rows": lambda d: expert_calls(d, [(7, 12, 3, 19)]),
    "experts of products": lambda d: product_calls([((3, 0, 18), 4, 2, 5, 7, False)]),
    "delta_rule by gates": gate_calls,
    "exact_sum": lambda d: sum_calls(d, [600], HARD_SUMS[2:5]),
}
# Odd calls are for the interpreter.
ODD = {
    "rms_norm": lambda d: norm_calls(
        "rms_norm",
        d,
        [
            *((7, 1, None), (9, 1025, None), (6, 4096, None), (0, 8, None), (270, 5, [257, 6, 7])),
            *((64, 70, [2] * 32), (44, 3, [1, 0] * 20 + [24, 0, 0, 0])),
        ],
    ),
    "rms_norm over heads": lambda d: head_calls(d, [(1, 17, 1, 5), (3, 2, 8, 16), (2, 5, 12, 3)]),
    "rms_norm with an offset": lambda d: offset_calls(d, [(1, 17, 5), (4, 3, 1025), (0, 8)]),
    "layer_norm": lambda d: norm_calls(
        "layer_norm", d, [(7, 1, None), (9, 1025, None), (0, 8, None), (64, 70, [2] * 32)]
    ),
    "softmax": lambda d: row_calls("softmax", d, [(6, 1), (7, 1025), (6, 2048), (0, 9), (35, 17)]),
    "log_softmax": lambda d: row_calls(
        "log_softmax", d, [(6, 1), (7, 1025), (6, 2048), (0, 9), (35, 17)]
    ),
    "silu": lambda d: element_calls("silu", d, [(17, 81)]),
    "gelu": lambda d: element_calls("gelu", d, [(17, 81)]),
    "gelu by tanh": lambda d: element_calls("gelu by tanh", d, [(17, 81)]),
    "swiglu": lambda d: element_calls("swiglu", d, [(17, 81)]),
    "rotary": lambda d: rotary_calls(
        d, [((2, 5, 3, 10), (2, 1, 10)), ((4, 1, 64), (1, 64)), ((0, 3, 2), (1, 2))]
    ),
    "embedding": lambda d: embedding_calls(
        d,
        [
            ((4, 9), 12, 70, None, None),
            ((300,), 5, 3, [2, 257, 40, 1], 0),
            ((0,), 5, 3, None, None),
        ],
    ),
    "select_rows": lambda d: selection_calls(
        d, [((40, 5), list(range(39, 0, -2))), ((3, 2, 600), [5]), ((4, 7), [])]
    ),
    "causal_conv": lambda d: convolution_calls(
        d, [((2, 7, 70), 4, None, False), ((3, 3), 1, [2, 1], False), ((4, 3), 2, [1, 3], True)]
    ),
    "experts by routes": lambda d: route_calls(
        d,
        [
            (12, 3, "softmax", True, 2.5, 1, 1, False),
            (9, 4, "softmax", False, 1.0, 3, 2, True),
            (6, 2, "sigmoid", True, 0.1, 6, 3, False),
            (5, 5, "softmax_of_chosen", True, 1.5, 1, 1, False),
            (12, 1, "sigmoid_of_chosen", True, 1.0, 2, 1, True),
        ],
    ),
    "experts of rows": lambda d: expert_calls(
        d, [(5, 3, 2, 70), (6, 64, 6, 3), (0, 4, 2, 5), (1, 2, 1, 9)]
    ),
    "experts of products": lambda d: product_calls([((2, 30, 1), 5, 3, 20, 3, True)]),
    "delta_rule by gates": gate_calls,
    "exact_sum": lambda d: sum_calls(
        d, [1, 5000], HARD_SUMS[::2] if d != torch.float32 else HARD_SUMS
    ),
}


def differences(calls, kind, target, **options):
    """Return (call, result) of every result whose bits differ from those of the CPU's executor."""
    import isobit.certifying

    found = []
    for number, call in enumerate(calls):
        expected = call.results()
        with isobit.certifying.executing(kind, target=target, **options):
            received = call.results()
        assert len(expected) == len(received) >= 2
        pairs = zip(expected, received, strict=True)
        found += [(number, at) for at, (a, b) in enumerate(pairs) if not isobit.bits.equal(a, b)]
    return found
