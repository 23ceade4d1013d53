"""Theorem: machine code has no fused product and sum that the PTX has not, and matrix products where the PTX has them.

A PTX text with products and sums that ptxas is free to fuse must go red. AMD's code is looked at as text: k is
ascending in every matrix product, and nothing is approximate.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.machine_code import (
    NVIDIA,
    Examined,
    attested_calls,
    examine,
    examine_amd,
    examine_amdgcn,
    examine_ptx,
)
from isobit.certifying.running import card, sass
from isobit.certifying.running.backends import compiler_for
from isobit.certifying.running.compile import gpu_target, source_of

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


def kept(found):
    print(found.target, len(found.made), found.products, found.written, found.known)
    assert not found.faults, found.faults
    return found


def test_ptxas_keeps_the_roundings_of_some_kernels():
    """The delta rule has fused products and sums next to those that must not be, AdamW divisions and roots."""
    found = kept(examine("sm_90", ("adamw", "delta_rule")))
    assert len(found.made) >= 14
    assert found.written >= 8
    assert found.known == len(found.made)


@pytest.mark.full
@pytest.mark.parametrize("target", NVIDIA)
def test_ptxas_keeps_the_roundings_and_the_products(target):
    found = kept(examine(target))
    assert len(found.made) >= 120
    assert found.products >= 20
    assert found.written >= 9
    left = set(card.recorded_digests().get(target, {})) - found.made
    assert not left, f"of PTX that is not made: python -m benchmarks.machine_code {target}"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (APART, ""),
        (FREE, "may fuse"),
        (".reg .b16 %h; cvt.rn.f16.f32 %h, %f2; add.f16 %h, %h, %h;", "16 bits"),
        (APART.replace("add.rn", "add.rz") + FREE.replace("add.f32", "add.rn.f32"), "may fuse"),
    ],
)
def test_faults_of_a_text_are_named(body, fault):
    found = Examined("sm_90")
    examine_ptx(found, "planted", planted("sm_90", body)[0], "0" * 32)
    assert bool(found.faults) == bool(fault)
    assert fault in " ".join(found.faults)


def test_machine_code_that_is_not_the_recorded_one_is_a_fault(monkeypatch):
    ptx, _ = planted("sm_90", APART)
    monkeypatch.setattr(card, "recorded", lambda target, digest: "another")
    found = Examined("sm_90")
    examine_ptx(found, "planted", ptx, "0" * 32)
    assert found.faults == ["sm_90, planted: the machine code is not the recorded one"]


def test_matrix_products_that_the_ptx_has_not_are_a_fault(monkeypatch):
    monkeypatch.setattr(sass, "count_products", lambda ptx: 4)
    found = Examined("sm_90")
    examine_ptx(found, "planted", planted("sm_90", APART)[0], "0" * 32)
    assert "matrix products are not where" in found.faults[0]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gfx942_adds_in_order_of_k_and_fuses_nothing(dtype):
    found = kept(examine_amd(dtype))
    assert found.products >= 10
    assert found.written < len(found.made)


@pytest.mark.parametrize(
    ("text", "code", "fault"),
    [
        ("", "v_add_f32 v0, v1, v2", ""),
        ("tt.dot {kWidth = 4}>> * {kWidth = 4}>>", "v_mfma_f32", ""),
        ("tt.dot {kWidth = 8}>> * {kWidth = 8}>>", "v_mfma_f32", "k is not ascending"),
        ("", "v_exp_f32 v0, v1", "approximate"),
        ("", "v_fmac_f32 v0, v1, v2", "fused"),
        ("math.fma", "v_fmac_f32 v0, v1, v2", ""),
    ],
)
def test_faults_of_amd_code_are_named(text, code, fault):
    found = Examined("gfx942")
    examine_amdgcn(found, "planted", text, code, torch.bfloat16)
    assert bool(found.faults) == bool(fault)
    assert fault in " ".join(found.faults)


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
