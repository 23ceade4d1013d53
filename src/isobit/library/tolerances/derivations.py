"""The least accurate kernel of each operator that is still right, with the errors that its roundings can have.

[Note: the least accurate right kernel]
It adds in fp32 in any order, and stores values where kernels that people use do: where one kernel hands them to the
next. Each `stored` in row_kernels.py and token_kernels.py is one of those values. The bound of the table must allow
every element's error, and not much more.
"""

from __future__ import annotations

from collections.abc import Callable

from isobit.library.any_kernel import attention_operators, operators, token_operators
from isobit.library.any_kernel.within import Operator, Values
from isobit.library.tolerances import row_kernels, token_kernels
from isobit.library.tolerances.rounding import Rounded
from isobit.library.tolerances.row_kernels import Errors, Given

Forward = Callable[[Given], Rounded]
Backward = Callable[[Given, Rounded], Errors]
KERNELS: dict[str, tuple[type[Operator], Forward, Backward]] = {
    "attention": (
        attention_operators.Attention,
        token_kernels.attention,
        token_kernels.attention_gradients,
    ),
    "cross_entropy": (
        token_operators.CrossEntropy,
        token_kernels.cross_entropy,
        token_kernels.cross_entropy_gradients,
    ),
    "embedding": (
        token_operators.Embedding,
        token_kernels.embedding,
        token_kernels.embedding_gradients,
    ),
    "gelu": (operators.Gelu, row_kernels.gelu, row_kernels.gelu_gradients),
    "gqa": (attention_operators.Gqa, token_kernels.attention, token_kernels.attention_gradients),
    "layer_norm": (operators.LayerNorm, row_kernels.layer_norm, row_kernels.layer_norm_gradients),
    "linear": (operators.Linear, row_kernels.linear, row_kernels.linear_gradients),
    "log_softmax": (
        operators.LogSoftmax,
        row_kernels.log_softmax,
        row_kernels.log_softmax_gradients,
    ),
    "logprob": (token_operators.Logprob, token_kernels.logprob, token_kernels.logprob_gradients),
    "rms_norm": (operators.RmsNorm, row_kernels.rms_norm, row_kernels.rms_norm_gradients),
    "rope": (attention_operators.Rope, token_kernels.rope, token_kernels.rope_gradients),
    "silu": (operators.Silu, row_kernels.silu, row_kernels.silu_gradients),
    "softmax": (operators.Softmax, row_kernels.softmax, row_kernels.softmax_gradients),
    "swiglu": (operators.Swiglu, row_kernels.swiglu, row_kernels.swiglu_gradients),
}


def exactly(given: Values) -> Errors:
    """Return arguments as values without errors."""
    return {name: Rounded.exact(t) for name, t in given.items()}
