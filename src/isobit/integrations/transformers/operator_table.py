"""Table of operators that do not add numbers; every other stock operator counts as one that does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.ops.gpu.executors import is_triton_operator
from isobit.ops.registration import is_portable_operator

# Recognise isobit's own operators and gradient nodes by what is registered, because names can be imitated.

GENERATED = re.compile(r"GeneratedBackwardFor_isobit_(\w+)_default")
# The formulas of csrc/derivatives.cpp. No code in Python can make a node of this type.
COMPILED = re.compile(
    r"torch::autograd::CppNode<isobit::derivatives::Gradient<isobit::derivatives::\w+> ?>"
)
# What torch.profiler.record_function calls; nothing else in that namespace is torch's.
PROFILER = frozenset(
    ("_record_function_enter", "_record_function_enter_new", "_record_function_exit")
)


@lru_cache(maxsize=256)
def is_our_operator(name: str) -> bool:
    """Return whether `isobit::<name>` is a compiled kernel, or an operator of the portable or the Triton executors."""
    if is_portable_operator(name) or is_triton_operator(name):
        return True
    try:
        said = torch._C._dispatch_dump(f"isobit::{name}")
    except RuntimeError:
        return False
    # Kernels that Python registers have no unboxed form.
    kernels = [line for line in said.splitlines() if line.startswith(("CPU:", "Composite"))]
    return bool(kernels) and all("unboxed" in line for line in kernels)


def is_our_node(node: Any) -> bool:
    """Return whether a node of the autograd graph is our operator's formula or our autograd.Function."""
    made = getattr(node, "_forward_cls", None)
    if made is None:
        return type(node).__name__ == "CppFunction" and bool(COMPILED.fullmatch(node.name()))
    generated = GENERATED.fullmatch(made.__name__)
    if generated is not None:
        return made.__module__ == "torch._library.autograd" and is_our_operator(generated[1])
    return is_in_package(made.__module__, made.__qualname__, made)


def is_in_package(module: str, name: str, wanted: Any) -> bool:
    """Return whether this object is found under its name in a module of isobit."""
    if module.partition(".")[0] != "isobit":
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is wanted


@dataclass(frozen=True)
class Reason:
    """Why an operator carries an order, and what to use instead."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class Use:
    """An operator that ran, or a node of the gradient's graph; `reason` is empty where it carries no order."""

    operator: str
    count: int
    reason: str = ""
    remedy: str = ""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- what adds nothing ----------------------------------------------------------------------------------

MOVES = words(
    "view _unsafe_view _reshape_alias reshape transpose t permute expand slice select unsqueeze squeeze split "
    "split_with_sizes unsafe_split unbind narrow as_strided detach alias lift lift_fresh unfold diagonal view_as_real "
    "view_as_complex view_as clone _lazy_clone copy _to_copy contiguous cat stack repeat flip roll index_select gather "
    "index take masked_select where masked_fill index_fill fill zero constant_pad_nd tril triu slice_scatter "
    "select_scatter index_copy slice_backward select_backward embedding set resize one_hot repeat_interleave pin_memory"
)
CREATIONS = words(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones "
    "ones_like new_ones full full_like new_full arange scalar_tensor eye tril_indices triu_indices"
)
# exp to rsqrt: torch's give the same bits in vectors, tails and strides (measured); silu, sigmoid and gelu do not.
ELEMENTWISE = words(
    "add sub rsub mul div neg abs sqrt reciprocal sign square maximum minimum clamp clamp_min clamp_max relu floor "
    "ceil round trunc frexp frac addcmul addcdiv lerp positive fmax fmin copysign nextafter exp log rsqrt tanh sin cos "
    "threshold_backward where masked_fill nan_to_num"
)
COMPARISONS = words(
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
    "bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite isin all "
    "any equal is_nonzero _local_scalar_dense is_same_size"
)
CHOICES = words(
    "max min amax amin argmax argmin aminmax topk sort argsort kthvalue cummax cummin nonzero unique_consecutive "
    "_unique2 searchsorted bucketize count_nonzero"
)
FREE = MOVES | CREATIONS | ELEMENTWISE | COMPARISONS | CHOICES
INTEGER_SUMS = words(
    "sum cumsum prod cumprod dot mm bmm addmm trace diff floor_divide remainder fmod pow index_add scatter_add bincount"
)
EXACT_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)  # done by products, roots and reciprocals

# ---- what is known to ----------------------------------------------------------------------------------

PRODUCT = Reason(
    "a product's sum is cut by shape, threads and library", "isobit.linear, or isobit.nn.Linear"
)
ATTENTION = Reason("its blocks depend on the lengths of the whole batch", "isobit.attention")
ROW_SUM = Reason(
    "the sum depends on storage, extent and threads", "isobit.exact_sum, or an operator of isobit"
)
TAILS = Reason(
    "its vector body and its tail have other bits", "isobit.silu, isobit.gelu or isobit.swiglu"
)
SOFTMAX = Reason("a row's sum in stock's order", "isobit.softmax or isobit.log_softmax")
NORM = Reason(
    "sums over features, and over the batch for its parameters",
    "isobit.layer_norm or isobit.rms_norm",
)
SCATTER = Reason(
    "adds rows that meet in one place, in the order of the batch", "isobit.embedding for lookups"
)
LOSS = Reason(
    "the mean over the batch", "isobit.linear_cross_entropy, or isobit.exact_sum of the terms"
)
RANDOM = Reason(
    "draws from one generator for the whole batch",
    "isobit.integrations.transformers.sampling.KeyedSampling; dropout of 0",
)
COLLECTIVE = Reason("ranks are added in the transport's order", "isobit's collectives")
FUSED = Reason("its vector body and its tail have other bits", "isobit.optim.AdamW, or fused=False")
BROADCAST = Reason(
    "a broadcast value needs a gradient, which is a sum", "an operator of isobit that owns the sum"
)

REASONS: dict[str, Reason] = {
    **dict.fromkeys(
        words("mm addmm bmm baddbmm addbmm addmv mv dot vdot matmul linear mkldnn_linear einsum"),
        PRODUCT,
    ),
    **dict.fromkeys(
        words("_addmm_activation convolution convolution_backward _scaled_mm addr ger outer"),
        PRODUCT,
    ),
    **dict.fromkeys(
        words("sum mean nansum cumsum prod cumprod logsumexp logcumsumexp var std"), ROW_SUM
    ),
    **dict.fromkeys(
        words(
            "var_mean std_mean norm linalg_vector_norm dist trace sum_to_size histc _foreach_norm"
        ),
        ROW_SUM,
    ),
    **dict.fromkeys(words("softmax _softmax log_softmax _log_softmax"), SOFTMAX),
    **dict.fromkeys(
        words("_softmax_backward_data _log_softmax_backward_data _safe_softmax"), SOFTMAX
    ),
    **dict.fromkeys(
        words("native_layer_norm native_layer_norm_backward native_group_norm native_batch_norm"),
        NORM,
    ),
    **dict.fromkeys(
        words("_fused_rms_norm _fused_rms_norm_backward native_group_norm_backward"), NORM
    ),
    **dict.fromkeys(
        words("silu silu_backward sigmoid sigmoid_backward gelu gelu_backward softplus"), TAILS
    ),
    **dict.fromkeys(
        words("mish hardswish erf tanh_backward log_sigmoid_forward log_sigmoid_backward elu"),
        TAILS,
    ),
    **dict.fromkeys(
        words("embedding_dense_backward embedding_backward _embedding_bag index_add scatter_add"),
        SCATTER,
    ),
    **dict.fromkeys(
        words(
            "bincount scatter_reduce index_reduce index_put _index_put_impl _unsafe_index_put put"
        ),
        SCATTER,
    ),
    **dict.fromkeys(
        words(
            "nll_loss nll_loss_forward nll_loss_backward mse_loss mse_loss_backward l1_loss kl_div"
        ),
        LOSS,
    ),
    **dict.fromkeys(
        words("multinomial bernoulli native_dropout normal uniform rand randn rand_like"), RANDOM
    ),
    **dict.fromkeys(
        words(
            "randn_like randint randint_like randperm exponential random geometric cauchy log_normal"
        ),
        RANDOM,
    ),
    **dict.fromkeys(words("_fused_adam _fused_adamw _fused_sgd _fused_adagrad"), FUSED),
}
UNKNOWN = Reason(
    "unknown: treated as carrying an order",
    "ask for it to be added to isobit.integrations.transformers.operator_table",
)


def short_name(func: Any) -> str:
    """Return `add` for aten::add_.Tensor; names of other namespaces keep their prefix."""
    space, _, name = str(func._schema.name).partition("::")
    if space != "aten":
        return str(func._schema.name)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def find_reason(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Reason | None:
    """Return why this call adds in an order of its own, or None if it is known not to."""
    name = short_name(func)
    named = kwargs or {}
    tensors = list(tensors_in([*args, *named.values()]))
    if "::" in name:
        space, _, own = name.partition("::")
        if (space == "isobit" and is_our_operator(own)) or (
            space == "profiler" and own in PROFILER
        ):
            return None
        if "c10d" in space:
            return (
                COLLECTIVE
                if "reduce" in name and any(t.is_floating_point() for t in tensors)
                else None
            )
        return REASONS.get(name, UNKNOWN)
    if name.startswith("_foreach_") and name not in REASONS:
        name = name.removeprefix("_foreach_")
    whole = bool(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)
    if whole and name in INTEGER_SUMS and not asks_for_floats(named):
        return None
    if name == "pow" and len(args) > 1 and args[1] in EXACT_POWERS:
        return BROADCAST if is_broadcast(name, args, tensors) else None
    if name in ("index_put", "_index_put_impl", "_unsafe_index_put") and not accumulates(
        args, named
    ):
        return None
    if name in FREE or (name == "scatter" and "reduce" not in func._schema.overload_name):
        return BROADCAST if is_broadcast(name, args, tensors) else None
    return ATTENTION if name.startswith("_scaled_dot_product") else REASONS.get(name, UNKNOWN)


def tensors_in(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield tensors, also those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def asks_for_floats(named: dict[str, Any]) -> bool:
    dtype = named.get("dtype")
    return isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)


def accumulates(args: Sequence[Any], named: dict[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else named.get("accumulate", False))


def is_broadcast(name: str, args: Sequence[Any], tensors: list[Tensor]) -> bool:
    """Return whether a value that needs a gradient is broadcast: its gradient is then a sum."""
    if not torch.is_grad_enabled() or name not in ELEMENTWISE | {"expand", "repeat"}:
        return False
    if name in ("expand", "repeat"):
        size = 1
        for own, asked in zip(
            reversed([1] * len(args[1]) + list(args[0].shape)), reversed(args[1]), strict=False
        ):
            size *= own * asked if name == "repeat" else own if asked == -1 else asked
        return bool(args[0].requires_grad) and size > args[0].numel()
    if is_list_call(args):
        return False
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return any(t.requires_grad and t.numel() < shape.numel() for t in tensors)


def is_list_call(args: Sequence[Any]) -> bool:
    """Return whether the first argument is a list, as in _foreach_ operators."""
    return bool(args) and isinstance(args[0], (list, tuple))
