"""Right kernels of other people, unedited: functions of the number of rows that call a package as its users do.

Liger, fla-core, unsloth and vLLM are taken if Python finds them, batch_invariant_ops and Triton's tutorials, which are
in no registry, if the environment variable of `FOLDERS` names a folder with them. Modules of kernels run as they are.
The `__init__` of unsloth and of vLLM do not run: they patch torch and want a GPU; nor does what a tutorial does after
its definitions, which is to measure.
"""

import ast
import importlib.util
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from benchmarks.records import ROOT
from isobit.certifying.running.compile import absent_driver
from isobit.certifying.running.stand_in import standing_in

TARGET = "sm_90"
# Checkouts of triton-lang/triton at v3.7.1 (its folder python/tutorials) and thinking-machines-lab/batch_invariant_ops.
TUTORIALS, INVARIANT_OPS = "ISOBIT_TUTORIALS", "ISOBIT_BATCH_INVARIANT_OPS"
BARE = (
    *("unsloth", "unsloth.kernels", "unsloth_zoo"),
    *("vllm", "vllm.model_executor", "vllm.model_executor.determinism"),
    *("vllm.platforms", "vllm.triton_utils"),
)


def rotate(function, rows, *more):
    """Call a rotary embedding of one sample, with a row per token, as a model of transformers does."""
    q, k = torch.randn(1, rows, 4, 64).transpose(1, 2), torch.randn(1, rows, 2, 64).transpose(1, 2)
    return function(q, k, torch.randn(*more, rows, 64), torch.randn(*more, rows, 64))


def draw(rows, columns=256, **given):
    return torch.randn(rows, columns, **given)


def package_kernels():
    """Yield (name, function of the number of rows) of the kernels of each package that is here."""
    packages = {
        "liger_kernel": liger_kernels,
        "fla": fla_kernels,
        "unsloth": unsloth_kernels,
        "vllm": vllm_kernels,
    }
    with absent_driver(TARGET), standing_in(TARGET):
        found = [package for package in packages if importlib.util.find_spec(package)]
        for name in BARE:
            import_bare(name)
        functions = [one for package in found for one in packages[package]()]
        if TUTORIALS in os.environ:
            functions += tutorial_kernels(Path(os.environ[TUTORIALS]))
        if INVARIANT_OPS in os.environ:
            functions += invariant_kernels(Path(os.environ[INVARIANT_OPS]))
    yield from functions


def import_bare(name):
    """Make a package known to Python without running its `__init__`."""
    parent = name.rpartition(".")[0]
    place = sys.modules[parent].__path__ if parent else None
    found = PathFinder.find_spec(name, place)
    if name in sys.modules or found is None:
        return
    module = importlib.util.module_from_spec(ModuleSpec(name, None, is_package=True))
    module.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = module


def liger_kernels():
    """Return Liger's functions of rows."""
    from liger_kernel.transformers import functional as liger

    weight, bias = torch.randn(256), torch.randn(256)
    # At 256 columns or fewer, Liger's rms_norm is another kernel from 32,768 rows on.
    wide, heads, one, three = torch.randn(512), weight[:128].clone(), torch.ones(1), torch.ones(3)

    def losses(rows):
        return liger.liger_cross_entropy(
            draw(rows), torch.randint(0, 256, (rows,)), reduction="none"
        )

    def add_norm(rows):
        return liger.liger_fused_add_rms_norm(draw(rows), draw(rows), weight, 1e-6)

    return [
        ("Liger: softmax", lambda rows: liger.liger_softmax(draw(rows))),
        ("Liger: sparsemax", lambda rows: liger.liger_sparsemax(draw(rows, 64))),
        ("Liger: swiglu", lambda rows: liger.liger_swiglu(draw(rows), draw(rows))),
        ("Liger: geglu", lambda rows: liger.liger_geglu(draw(rows), draw(rows))),
        ("Liger: relu_squared", lambda rows: liger.liger_relu_squared(draw(rows))),
        ("Liger: dyt", lambda rows: liger.liger_dyt(draw(rows), one, weight, bias)),
        ("Liger: layer_norm", lambda rows: liger.liger_layer_norm(draw(rows), weight, bias, 1e-5)),
        ("Liger: group_norm", lambda rows: group_norm(liger, rows, weight, bias)),
        ("Liger: rms_norm", lambda rows: liger.liger_rms_norm(draw(rows, 512), wide, 1e-6)),
        (
            "Liger: rms_norm of heads",
            lambda rows: liger.liger_rms_norm(draw(rows, 128), heads, 1e-6),
        ),
        ("Liger: poly_norm", lambda rows: liger.liger_poly_norm(draw(rows), three, one)),
        ("Liger: fused_add_rms_norm", add_norm),
        ("Liger: rope", lambda rows: rotate(liger.liger_rope, rows, 1)),
        ("Liger: cross_entropy", losses),
    ]


def group_norm(liger, rows, weight, bias):
    """Normalise 8 channels in 2 groups."""
    return liger.liger_group_norm(torch.randn(rows, 8, 64), weight[:8], bias[:8], 8, 2, 1e-6)


def fla_kernels():
    """Return functions of rows of flash-linear-attention."""
    from fla.modules import activations
    from fla.modules.fused_cross_entropy import cross_entropy_loss
    from fla.modules.l2norm import l2norm
    from fla.modules.layernorm import group_norm, layer_norm, rms_norm
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    weight, bias = torch.randn(256), torch.randn(256)

    def losses(rows):
        return cross_entropy_loss(draw(rows), torch.randint(0, 256, (rows,)))[0]

    def gated(rows):
        return rms_norm_gated(draw(rows), draw(rows), weight, None)

    return [
        ("fla: rms_norm", lambda rows: rms_norm(draw(rows), weight, None)),
        ("fla: layer_norm", lambda rows: layer_norm(draw(rows), weight, bias)),
        ("fla: group_norm", lambda rows: group_norm(draw(rows), weight, bias, num_groups=4)),
        ("fla: rms_norm_gated", gated),
        ("fla: l2norm of heads", lambda rows: l2norm(draw(rows, 128))),
        ("fla: swiglu", lambda rows: activations.swiglu(draw(rows), draw(rows))),
        ("fla: swish", lambda rows: activations.swish(draw(rows))),
        ("fla: sigmoid", lambda rows: activations.sigmoid(draw(rows))),
        ("fla: cross_entropy", losses),
    ]


def unsloth_kernels():
    """Return unsloth's functions of rows."""
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(ROOT / "build" / "unsloth"))
    sys.modules["unsloth_zoo"].DEVICE_TYPE = "cuda"
    from unsloth.kernels import geglu, swiglu
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss
    from unsloth.kernels.layernorm import fast_layernorm
    from unsloth.kernels.rms_layernorm import fast_rms_layernorm
    from unsloth.kernels.rope_embedding import fast_rope_embedding

    rms = torch.nn.RMSNorm(256, eps=1e-6)
    layer = torch.nn.LayerNorm(256)

    def losses(rows):
        return Fast_CrossEntropyLoss.apply(draw(rows), torch.randint(0, 256, (rows,)))

    def heads(rows, function):
        return function(torch.randn(rows, 1, 256), torch.randn(rows, 1, 256))

    return [
        ("unsloth: rms_norm", lambda rows: fast_rms_layernorm(rms, draw(rows))),
        ("unsloth: rms_norm, gemma", lambda rows: fast_rms_layernorm(rms, draw(rows), gemma=True)),
        ("unsloth: layer_norm", lambda rows: fast_layernorm(layer, draw(rows))),
        ("unsloth: swiglu", lambda rows: heads(rows, swiglu.swiglu_fg_kernel)),
        ("unsloth: geglu, exact", lambda rows: heads(rows, geglu.geglu_exact_forward_kernel)),
        ("unsloth: geglu, approx", lambda rows: heads(rows, geglu.geglu_approx_forward_kernel)),
        ("unsloth: rope", lambda rows: rotate(fast_rope_embedding, rows)),
        ("unsloth: cross_entropy", losses),
    ]


def vllm_kernels():
    """Return functions of vLLM's batch-invariant mode; what they ask vLLM about the platform is answered here."""
    import triton
    import triton.language as tl

    platform = SimpleNamespace(
        is_cuda_alike=lambda: True, is_xpu=lambda: False, is_rocm=lambda: False,
        get_device_name=lambda device=0: "NVIDIA H100 80GB HBM3",
        get_device_capability=lambda device=0: SimpleNamespace(major=9, minor=0),
        is_cuda=lambda: True,
    )  # fmt: skip
    answers = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.mem_utils": {"get_max_shared_memory_bytes": lambda gpu=0: 232_448},
        "vllm.utils.platform_utils": {"num_compute_units": lambda device=0: 132},
    }
    for name, given in answers.items():
        vars(import_module(name)).update(given)
    ops = import_module("vllm.model_executor.determinism.batch_invariant")
    weight, square = torch.randn(256), torch.randn(64, 64, dtype=torch.bfloat16)

    def product(rows):
        return ops.linear_batch_invariant(draw(rows, 64, dtype=torch.bfloat16), square)

    def batched(rows):
        return ops.bmm_batch_invariant(*torch.randn(2, rows, 16, 16, dtype=torch.bfloat16))

    return [
        ("vLLM: rms_norm", lambda rows: ops.rms_norm_batch_invariant(draw(rows), weight)),
        ("vLLM: softmax", lambda rows: ops.softmax(draw(rows))),
        ("vLLM: log_softmax", lambda rows: ops.log_softmax(draw(rows))),
        ("vLLM: mean", lambda rows: ops.mean_dim(draw(rows), 1)),
        ("vLLM: linear, bf16", product),
        ("vLLM: bmm, bf16", batched),
    ]


def invariant_kernels(folder):
    """Return functions of batch_invariant_ops."""
    sys.path.insert(0, str(folder))
    ops = import_module("batch_invariant_ops.batch_invariant_ops")
    weight = torch.randn(64, 64, dtype=torch.bfloat16)

    def product(rows):
        return ops.matmul_persistent(draw(rows, 64, dtype=torch.bfloat16), weight)

    return [
        ("batch_invariant_ops: matmul, bf16", product),
        ("batch_invariant_ops: log_softmax", lambda rows: ops.log_softmax(draw(rows))),
        ("batch_invariant_ops: mean", lambda rows: ops.mean_dim(draw(rows), 1)),
    ]


def tutorial_kernels(folder):
    """Return functions of Triton's tutorials."""
    add = definitions(folder / "01-vector-add.py").add
    softmax = definitions(folder / "02-fused-softmax.py").softmax
    matmul = definitions(folder / "03-matrix-multiplication.py").matmul
    norm = definitions(folder / "05-layer-norm.py").layer_norm
    attention = definitions(folder / "06-fused-attention.py").attention
    dependent = definitions(folder / "11-programmatic-dependent-launch.py").add
    weight, bias = torch.randn(256), torch.randn(256)
    square = torch.randn(64, 64, dtype=torch.float16)

    def attend(rows):
        q, k, v = (torch.randn(rows, 1, 128, 64, dtype=torch.float16) for _ in range(3))
        return attention(q, k, v, True, 0.125, False)

    return [
        ("tutorial 1: add", lambda rows: add(draw(rows), draw(rows))),
        ("tutorial 2: softmax", lambda rows: softmax(draw(rows))),
        (
            "tutorial 3: matmul, autotuned, fp16",
            lambda rows: matmul(draw(rows, 64, dtype=torch.float16), square),
        ),
        ("tutorial 5: layer_norm", lambda rows: norm(draw(rows), (256,), weight, bias, 1e-5)),
        ("tutorial 6: attention, fp16", attend),
        ("tutorial 11: add, dependent launch", lambda rows: dependent(draw(rows), draw(rows))),
    ]


def definitions(path):
    """Run a tutorial up to the first statement that calls something for its effect; return its module."""
    tree = ast.parse(path.read_text())
    calls = (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) for one in tree.body)
    end = next((number for number, found in enumerate(calls) if found), len(tree.body))
    tree.body = tree.body[:end]
    module = ModuleType(f"tutorial_{path.stem[:2]}")
    module.__file__, sys.modules[module.__name__] = str(path), module
    exec(compile(tree, str(path), "exec"), vars(module))
    return module
