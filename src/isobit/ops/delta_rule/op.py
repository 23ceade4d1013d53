"""The delta_rule operator: its torch operators, their gradients, the public function and the state that it carries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.delta_rule import gates, portable  # noqa: F401 (gates declares its operators)
from isobit.ops.delta_rule.portable import CHUNK, Sizes, sizes_of, unpack
from isobit.ops.device_tables import refuse_in_capture, values_of
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.share import accumulation_dtype
from isobit.order.samples import Samples


class DeltaState:
    """What `isobit.delta_rule` carries from call to call: the state of each sample, and the rows of its open chunk.

    A chunk has 64 tokens of a sample. Until it is full, its rows are kept, so that a decoded token reads what it would
    read in a prefill; then they are added to the state. So tokens can be dropped as far back as the chunk's start. It
    begins on the CPU, and goes to the device of the first call's tensors.

    Args:
        samples: The number of samples.
        key_heads: Heads of q and k.
        heads: Heads of v.
        key_size: The size of a head of q and k.
        value_size: The size of a head of v.
        dtype: The dtype of sums: fp32, or fp64 for fp64 tensors.

    Raises:
        ArgumentError: If a size is less than 1.

    Example:
        >>> q, k, v = (torch.randn(1, 70, 2, 8) * 0.3 for _ in range(3))
        >>> g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
        >>> whole = isobit.delta_rule(q, k, v, g, beta)
        >>> state = isobit.DeltaState(1, 2, 2, 8, 8)
        >>> calls = [(t[:, :69], t[:, 69:]) for t in (q, k, v, g, beta)]
        >>> first = isobit.delta_rule(*(call[0] for call in calls), state=state)
        >>> last = isobit.delta_rule(*(call[1] for call in calls), state=state)
        >>> torch.equal(torch.cat((first, last), 1), whole)
        True
    """

    def __init__(
        self,
        samples: int,
        key_heads: int,
        heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if min(samples, key_heads, heads, key_size, value_size) < 1 or heads % key_heads:
            raise ArgumentError(
                expected="sizes of 1 or more, and heads that are a multiple of key_heads",
                received=f"samples={samples}, key_heads={key_heads}, heads={heads}, key_size={key_size}, "
                f"value_size={value_size}",
                remedy="pass the sizes of q [..., key_heads, key_size] and v [..., heads, value_size]",
            )
        self.sizes = Sizes(key_heads, heads, key_size, value_size)
        self.packed = torch.zeros(
            samples, self.sizes.packed, dtype=dtype, device="cpu"
        )  # [samples, …]
        self.counts = [0] * samples  # tokens of each sample so far

    def crop(self, tokens: int) -> None:
        """Drop the last tokens of every sample.

        Args:
            tokens: How many.

        Raises:
            UnsupportedError: If a sample's open chunk has fewer: the state at the start of earlier ones is not kept.
        """
        for index, count in enumerate(self.counts):
            if not 0 <= tokens <= count % CHUNK:
                raise UnsupportedError(
                    expected=f"to drop at most the {count % CHUNK} tokens of the open chunk of sample {index}, which "
                    f"has {count} tokens in chunks of {CHUNK}",
                    received=f"{tokens}",
                    remedy="keep a copy from before these tokens (state.select), or compute the sample again",
                )
        for index, count in enumerate(self.counts):
            left = count % CHUNK - tokens
            for field in unpack(self.packed[index], self.sizes)[1:]:
                field[:, left:] = 0.0
            self.counts[index] = count - tokens

    def select(self, rows: Tensor) -> DeltaState:
        """Return a state that has these samples, in this order, as beam search reorders them.

        Args:
            rows: Numbers of samples, [n], each any number of times.

        Returns:
            A copy.
        """
        found = object.__new__(DeltaState)
        refuse_in_capture("DeltaState.select, whose counts of tokens are on the host")
        chosen = rows.to("cpu", torch.int64)
        found.sizes = self.sizes
        found.packed = self.packed.index_select(0, chosen.to(self.packed.device))
        found.counts = [self.counts[row] for row in chosen.tolist()]
        return found


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    samples: Samples | Tensor | None = None,
    state: DeltaState | None = None,
) -> Tensor:
    """Compute the gated delta rule of linear attention, with one result for every batch and every cut of a sample.

    For each token of a sample, and each head: S ← e^g S, S ← S + k ⊗ β (v − k S), o = q S. It is computed in chunks of
    64 tokens of the sample, in fp32, and rounded once; a token that is decoded has the bits of a prefill's. q and k are
    taken as they are: models normalise them, and scale q, before.

    Args:
        q: Shape [B, T, Hk, Dk] or [rows, Hk, Dk], in fp32, bf16 or fp16.
        k: The shape of q.
        v: Shape [..., H, Dv], with H a multiple of Hk: neighbouring heads read the same head of q and k.
        g: Shape [..., H], the logarithm of each token's decay, at most 0.
        beta: Shape [..., H], how much of the correction is written.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`). By default [B, T, …] are B
            samples.
        state: What earlier calls of the same samples left; it is changed to what this call leaves. A call with a state
            has no gradient.

    Returns:
        Tensor in the shape and dtype of v; zeros in rows of no sample.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or a value of g is positive.
        UnsupportedError: If a gradient is needed of a call with a state, or such a call is captured by a CUDA graph.

    Example:
        >>> q, k, v = (torch.randn(2, 9, 2, 8) * 0.3 for _ in range(3))
        >>> g, beta = -torch.rand(2, 9, 2), torch.rand(2, 9, 2)
        >>> alone = isobit.delta_rule(*(t[:1] for t in (q, k, v, g, beta)))
        >>> torch.equal(isobit.delta_rule(q, k, v, g, beta)[:1], alone)
        True
    """
    check_tensors(WITH_GPU, q=q, k=k, v=v, g=g, beta=beta)
    check_shapes(q, k, v, g, beta)
    refuse_growth(g)
    spans, _ = describe(samples, v.select(-2, 0))
    count = v.shape[:-3].numel() if spans is None else len(spans)
    sizes = (v.shape[:-2].numel(), v.shape[-2], q.shape[-1], v.shape[-1])
    given = (q, k, v, g, beta, spans)
    if state is None:
        return launch("delta_rule", sizes, *given, None, [])[0]  # type: ignore[no-any-return]
    check_state(state, given, count)
    refuse_in_capture("delta_rule with state=, whose counts of tokens are on the host")
    if not v.shape[-3]:  # no rows: the state stays
        return torch.zeros_like(v)
    before = state.packed.to(v.device)  # it begins on the CPU
    o, state.packed = launch("delta_rule", sizes, *given, before, state.counts)
    lengths = [v.shape[-3]] * count if spans is None else [length for _, length in values_of(spans)]
    state.counts = [a + b for a, b in zip(state.counts, lengths, strict=True)]
    return o  # type: ignore[no-any-return]


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise unless the five tensors describe the same rows and heads."""
    if q.dim() < 3 or 0 in q.shape[-2:]:
        refuse_shape("q", q, "[..., T, Hk, Dk]", "pass tokens, then heads, then their features")
    if k.shape != q.shape:
        refuse_shape("k", k, f"{list(q.shape)}, as q", "pass as many keys as queries")
    if v.dim() != q.dim() or v.shape[:-2] != q.shape[:-2] or 0 in v.shape[-2:]:
        expected = f"{[*q.shape[:-2]]} and heads, and their features"
        refuse_shape("v", v, expected, "pass a value for each key")
    if v.shape[-2] % q.shape[-2]:
        expected = f"[..., H, Dv], H a multiple of the {q.shape[-2]} heads of q"
        refuse_shape("v", v, expected, "repeat neighbouring heads of v, or take fewer of q and k")
    for name, tensor in (("g", g), ("beta", beta)):
        if tensor.shape != v.shape[:-1]:
            refuse_shape(name, tensor, f"{list(v.shape[:-1])}", "pass a number per token and head")


def refuse_growth(g: Tensor) -> None:
    """Raise if a state would grow: exponentials are defined for decays only. A GPU's executor asserts it itself."""
    if g.is_meta or g.is_cuda or torch.compiler.is_compiling():
        return
    if bool((g > 0).any()):
        raise ArgumentError(
            expected="g of at most 0, the logarithm of a decay",
            received=f"up to {float(g.max()):g}",
            remedy="pass −exp(A) · softplus(a + b), as models of the gated delta rule do",
        )


def check_state(state: DeltaState, given: tuple[Any, ...], count: int) -> None:
    """Raise unless the state is one of these samples and heads, and no gradient is needed."""
    q, _, v = given[:3]
    if not isinstance(state, DeltaState):
        raise ArgumentError(
            expected="state as an isobit.DeltaState",
            received=type(state).__name__,
            remedy="pass isobit.DeltaState(samples, key_heads, heads, key_size, value_size)",
        )
    expected = (sizes_of(q, v), count, accumulation_dtype(v.dtype))
    received = (state.sizes, len(state.counts), state.packed.dtype)
    if received != expected:
        raise ArgumentError(
            expected=f"a state of {expected[0]}, {count} samples, in {expected[2]}",
            received=f"{received[0]}, {received[1]} samples, in {received[2]}",
            remedy="make one state per layer and batch, and describe each of its samples in samples=, also with 0 rows",
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in given[:5]):
        raise UnsupportedError(
            expected="whole samples where a gradient is needed",
            received="state=, behind which samples go on",
            remedy="call it under torch.no_grad(), or without state= and with all tokens of each sample",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        return *operator(grad, *ctx.saved_tensors), None, None, None

    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        spans: Tensor | None,
        state: Tensor | None,
        counts: list[int],
    ) -> tuple[Tensor, Tensor]:
        samples = 0 if state is None else state.shape[0]
        after = (samples, sizes_of(q, v).packed)
        return v.new_empty(v.shape), v.new_empty(after, dtype=accumulation_dtype(v.dtype))

    def fake_backward(grad: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.new_empty(t.shape) for t in given[:5])

    register_operator("delta_rule", prefix, fake, backward, setup_context)
    register_operator("delta_rule", f"{prefix}_backward", fake_backward)


@portable_operator("portable_delta_rule")
def portable_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Tensor | None,
    state: Tensor | None,
    counts: list[int],
) -> tuple[Tensor, Tensor]:
    """Return o and the state that is left."""
    return portable.delta_rule(q, k, v, g, beta, spans_in(v, spans), state, counts)


@portable_operator("portable_delta_rule_backward")
def portable_delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, spans: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and beta."""
    return portable.delta_rule_backward(grad, q, k, v, g, beta, spans_in(v, spans))


def spans_in(v: Tensor, spans: Tensor | None) -> tuple[tuple[int, int], ...]:
    """Return (first row, number of rows) of each sample of v [..., T, H, Dv]."""
    return whole_samples(v.select(-2, 0), spans).spans


declare("delta_rule", register_formulas, triton="isobit.ops.delta_rule.triton")
