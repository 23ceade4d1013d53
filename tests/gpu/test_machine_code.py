"""Theorem: machine code has no fused product and sum that the PTX has not, and matrix products where the PTX has them.

A PTX text with products and sums that ptxas is free to fuse must go red. AMD's code is looked at as text: k is
ascending in every matrix product, and nothing is approximate.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.machine_code import attested_calls
from isobit.certifying.running import card, sass
from isobit.certifying.running.backends import compiler_for
from isobit.certifying.running.compile import gpu_target, source_of
from isobit.ops.gpu.executors import OPERATORS

NVIDIA = ("sm_80", "sm_90", "sm_100")
PLANTED = """.version 8.6
.target TARGET
.address_size 64
.visible .entry planted(.param .u64 p) {
  .reg .f32 %f<4>; .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [p];
  ld.global.f32 %f1, [%rd1];
  ld.global.f32 %f2, [%rd1+4];
  BODY
  st.global.f32 [%rd1], %f1;
  ret;
}
"""
FUSED_BY_HAND = "fma.rn.f32 %f1, %f2, %f2, %f1;"
DIVIDED = "div.rn.f32 %f1, %f1, %f2; div.rn.f32 %f2, %f2, 0f41C00000; sqrt.rn.f32 %f1, %f1;"
WIDENED = ".reg .b16 %h; cvt.rn.bf16.f32 %h, %f2; fma.rn.f32.bf16 %f1, %h, %h, %f1;"  # sm_100
FREE = "mul.f32 %f3, %f1, %f2; add.f32 %f1, %f3, %f1;"
APART = "mul.rn.f32 %f3, %f1, %f2; add.rn.f32 %f1, %f3, %f1;"


def planted(target, body):
    """Return (PTX, listing) of a kernel."""
    ptx = PLANTED.replace("TARGET", target + "a" * (target != "sm_80")).replace("BODY", body)
    return ptx, sass.listing(sass.assemble(ptx, target))


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.full] * (name != "sm_90")) for name in NVIDIA]
)
def test_the_check_sees_a_fused_product(target, monkeypatch):
    """ptxas fuses what is not rounded, unless it is told not to; .rn forbids it by itself.

    It is seen next to an fma that is written, and to divisions and a root.
    """
    real = sass.run
    monkeypatch.setattr(sass, "run", lambda words: real([w for w in words if w != "--fmad=false"]))
    widened = WIDENED if target == "sm_100" else ""
    for other in ("", FUSED_BY_HAND, widened + FUSED_BY_HAND + DIVIDED):
        for body, fused in ((FREE, True), (APART, False)):
            ptx, said = planted(target, other + body)
            assert sass.fuses(ptx, target, said) == fused, (other, body)
    assert sass.fuses(ptx, target, said.replace("FFMA", "FMUL", 1))  # not the code of this PTX


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_recorded_digests_are_of_the_kernels_that_are_made(target):
    """A digest of a text that Triton no longer makes is compared with nothing, and nobody would see it."""
    calls = attested_calls(target, ("silu", "exact_sum"))
    assert len(calls) >= 7
    for kernel, call in calls:
        digest = compiler_for(target).compile(kernel, call).facts.digest
        assert card.recorded(target, digest), kernel.__name__
    assert not card.recorded(target, "0" * 32)


# A sum of fp32 and widened bf16 (sub.rn.f32.bf16, sm_100) is one in fp32. HFMA2 also moves constants.
NARROW = re.compile(r"\b(?:add|sub|mul|fma)\.(?:(?:rn|ftz|sat|relu|oob)\.)*b?f16(?:x2)?\b")
UNROUNDED = re.compile(r"\b(?:add|sub|mul)\.(?:ftz\.|sat\.)*(?:f32|f32x2|f64)\b")


def check_machine_code(target, operators):
    """Check every kernel that an attestation of operators launches.

    Returns:
        The digests of their PTX, how many have matrix products, and how many a fused product and sum in their PTX.
    """
    made_of, products, known, written = set(), 0, 0, 0
    for kernel, call in attested_calls(target, operators):
        made = compiler_for(target).compile(kernel, call)
        if made.facts.digest in made_of:
            continue
        made_of.add(made.facts.digest)
        assert not UNROUNDED.search(made.ptx), kernel.__name__
        assert not NARROW.search(made.ptx), kernel.__name__
        said = sass.listing(sass.assemble(made.ptx, target))
        assert not sass.fuses(made.ptx, target, said), kernel.__name__
        code = sass.instructions(said)
        wanted = sass.count_products(made.ptx)
        assert bool(sass.count(code, sass.MATRIX)) == bool(wanted), kernel.__name__
        recorded = card.recorded(target, made.facts.digest)
        assert recorded in ("", sass.digest_of(code)), kernel.__name__
        products, known = products + bool(wanted), known + bool(recorded)
        written += "fma." in made.ptx
    print(
        f"{target}: {len(made_of)} kernels, {products} with matrix products, {known} with recorded code,"
        f" {written} with a fused product and sum in their PTX"
    )
    return made_of, products, written


def test_ptxas_keeps_the_roundings_of_some_kernels():
    """The delta rule has fused products and sums next to those that must not be, AdamW divisions and roots."""
    made, _, written = check_machine_code("sm_90", ("adamw", "delta_rule"))
    assert len(made) >= 14
    assert written >= 8


@pytest.mark.full
@pytest.mark.parametrize("target", NVIDIA)
def test_ptxas_keeps_the_roundings_and_the_products(target):
    made, products, written = check_machine_code(target, OPERATORS)
    assert len(made) >= 120
    assert products >= 20
    assert written >= 9
    left = set(card.recorded_digests().get(target, {})) - made
    assert not left, f"of PTX that is not made: python -m benchmarks.machine_code {target}"


MFMA = re.compile(r"(#mma\d*) = #ttg\.amd_mfma<\{[^}]*instrShape = \[(\d+), (\d+), (\d+)\]")
DOT = re.compile(r"tt\.dot .*kWidth = (\d+)\}>> \* .*kWidth = (\d+)\}>>")
APPROXIMATE = re.compile(r"\bv_(?:exp|log|rsq|sin|cos)_f32|\bv_mad_f32")
FUSED = re.compile(r"\bv_(?:pk_)?fma(?:c|mk|ak)?_f32")
DIVISION = re.compile(r"\bv_div_(?:scale|fmas|fixup)_f32|v_sqrt_f32|v_rcp_f32")


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gfx942_adds_in_order_of_k_and_fuses_nothing(dtype):
    from triton.compiler import compile as triton_compile

    dots = kernels = 0
    for kernel, call in attested_calls(
        "gfx942", ("linear", "attention", "rms_norm", "silu"), dtype
    ):
        made = triton_compile(
            source_of(kernel, call), target=gpu_target("gfx942"), options=call.options.__dict__
        )
        text, code = made.asm["ttgir"], made.asm["amdgcn"]
        widths = {width for found in DOT.findall(text) for width in found}
        # A lane has k in order if it has four 16-bit products of an instruction of 16 or 8, or one of fp32.
        assert widths <= ({"4"} if dtype == torch.bfloat16 else {"1"}), (kernel.__name__, widths)
        assert not APPROXIMATE.search(code), kernel.__name__
        written = "math.fma" in text or "tt.extern_elementwise" in text or dtype == torch.float32
        assert written or DIVISION.search(code) or not FUSED.search(code), kernel.__name__
        dots, kernels = dots + bool(widths), kernels + 1
    print(f"gfx942 {dtype}: {kernels} kernels, {dots} with matrix products")
    assert dots >= 10


SCRATCH = re.compile(r"(?:tt\.load|buffer_load) %scratch\b")
STEP = re.compile(r"ttg\.barrier|_(?:load|store)\b|tt\.(?:load|store|dot)\b|scf\.(?:if|for|while)")


def loads_without_a_barrier(text):
    """Return (number of loads of partial sums, those with anything but addresses since a barrier) of a TTGIR."""
    steps = [line.strip() for line in text.splitlines() if STEP.search(line)]
    found = [at for at, line in enumerate(steps) if SCRATCH.search(line)]
    return len(found), [steps[at] for at in found if not steps[at - 1].startswith("ttg.barrier")]


def test_partial_sums_are_loaded_behind_a_barrier_on_gfx942():
    """The gradient of a weight stores them in the layout of its product and loads them in another: by other waves.

    A sample without tokens has no products, whose pipeline would have a barrier, between the two.
    """
    from triton.compiler import compile as triton_compile

    seen = {}
    for kernel, call in attested_calls("gfx942", ("linear",)):
        if kernel.__name__ in ("linear_counter", "weight_grad") and kernel.__name__ not in seen:
            made = triton_compile(
                source_of(kernel, call), target=gpu_target("gfx942"), options=call.options.__dict__
            )
            seen[kernel.__name__] = made.asm["ttgir"]
    assert set(seen) == {"linear_counter", "weight_grad"}
    for name, text in seen.items():
        count, left = loads_without_a_barrier(text)
        assert count > 0, name
        assert left == [], name
        without = re.sub(r"\n *ttg\.barrier[^\n]*", "", text)
        assert len(loads_without_a_barrier(without)[1]) == count  # what the test would see
    stored = re.findall(r"buffer_store .*%scratch.*(#\w+)> loc", seen["weight_grad"])
    loaded = re.findall(r"buffer_load %scratch.*(#\w+)> loc", seen["weight_grad"])
    assert stored
    assert loaded
    assert set(stored) != set(loaded)  # if they are alike, the barrier is not needed any more
