"""Liger's kernels in Triton's interpreter, on CPU tensors: functions that `isobit check` can call, and their verdicts.

`python -m benchmarks.liger_kernels` prints the records of all as JSON; `benchmarks candidates` starts it, because
Triton decides when it is imported whether it interprets. The interpreter keeps a float argument of a kernel as a Python
number, where compiled code has an fp32 scalar, and has no libdevice; `as_compiled` gives it both. It adds bf16 as
integers, so that only fp32 is judged.
"""

import dataclasses
import importlib
import json
import os
import sys

SIZES = {"rows": (18,), "samples": (18,), "n": (40,), "v": (40,), "tokens": (1, 3)}
FEW_IDS = {"v": (5,), "rows": (33,)}  # of an embedding: the first and the last id are among them
KERNELS = {
    "rms_norm": ("rms_norm", "rms_norm_out_of_place"),
    "layer_norm": ("layer_norm",),
    "softmax": ("softmax",),
    "swiglu": ("swiglu", "swiglu_of_copies"),
    "rope": ("rope", "rope_of_a_copy", "rope_as_models_store_it"),
    "cross_entropy": ("cross_entropy", "cross_entropy_of_a_copy"),
    "embedding": ("embedding",),
    "logprob": ("fused_linear_cross_entropy",),
}


def liger():
    from liger_kernel.transformers import functional

    return functional


def rms_norm(x, weight):
    return liger().liger_rms_norm(x, weight, 1e-6)


def rms_norm_out_of_place(x, weight):
    return liger().liger_rms_norm(x, weight, 1e-6, in_place=False)


def layer_norm(x, weight, bias):
    return liger().liger_layer_norm(x, weight, bias, 1e-5)


def softmax(x):
    return liger().liger_softmax(x)


def swiglu(gate, up):
    return liger().liger_swiglu(gate, up)


def swiglu_of_copies(gate, up):
    return liger().liger_swiglu(gate.clone(), up.clone())


def rope(x, cos, sin):
    return liger().liger_rope(x, x.detach().clone(), cos, sin)[0]


def rope_of_a_copy(x, cos, sin):
    return rope(x.clone(), cos, sin)


def rope_as_models_store_it(x, cos, sin):
    tokens = x.transpose(1, 2)  # with the strides of a layer's output, also of an axis of one token
    flat = tokens.reshape(len(x), -1).clone()
    return rope(flat.view(tokens.shape).transpose(1, 2), cos, sin)


def cross_entropy(logits, targets):
    return liger().liger_cross_entropy(logits, targets, reduction="none")


def cross_entropy_of_a_copy(logits, targets):
    return liger().liger_cross_entropy(logits.clone(), targets, reduction="none")


def embedding(ids, weight):
    from liger_kernel.ops import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(weight, ids)


def fused_linear_cross_entropy(hidden, weight, targets):
    return -liger().liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")


def as_compiled():
    """Let the interpreter take floats for fp32 scalars, and Triton's rsqrt for libdevice's, which it does not have.

    The interpreter replaces functions of `tl.math` while a kernel runs, so that rsqrt is looked up at each call.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._implicit_cvt

    def converted(argument):
        if isinstance(argument, float):
            value = numpy.array([argument], dtype=numpy.float32)
            return tl.tensor(interpreter.TensorHandle(value, tl.float32), tl.float32)
        return plain(argument)

    interpreter._implicit_cvt = converted
    for module in ("layer_norm", "rms_norm"):
        importlib.import_module(f"liger_kernel.ops.{module}").rsqrt = lambda x: tl.math.rsqrt(x)


def judged(like, name):
    """Judge a kernel at a few sizes, because an interpreted row takes milliseconds."""
    from benchmarks.judged_kernels import records_of
    from isobit.contracts.options import Options
    from isobit.library.any_kernel.kernel_judging import chosen

    contract = chosen(like, ["float32"])
    chosen_sizes = SIZES | (FEW_IDS if like == "embedding" else {})
    inputs = {
        key: dataclasses.replace(
            drawn,
            sizes={size: chosen_sizes.get(size, values) for size, values in drawn.sizes.items()},
        )
        for key, drawn in contract.inputs.items()
    }
    contract = dataclasses.replace(contract, inputs=inputs)
    options = Options(trusted=("benchmarks",), subject=f"benchmarks.liger_kernels:{name}", level=2)
    return records_of(contract, options, like)


def main():
    """Print the records of every kernel, or an empty list if Liger is not installed."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        liger()
    except ImportError as error:
        print(f"Liger is not judged: {error}", file=sys.stderr)
        print("[]")
        return
    as_compiled()
    chosen = sys.argv[1:]
    print(
        json.dumps(
            [
                [name, like, [dataclasses.asdict(record) for record in judged(like, name)]]
                for like, names in KERNELS.items()
                for name in names
                if not chosen or name in chosen
            ]
        )
    )


if __name__ == "__main__":
    main()
