"""Audits made by hand, for the tests of reports: as rich as a real one, and every case that a sentence must cover."""

from dataclasses import replace
from functools import lru_cache

import isobit
from isobit.auditing.records import (
    Accuracy,
    Audit,
    AxisReport,
    Effect,
    FirstDifference,
    Group,
    Guilty,
    Place,
    Skipped,
    Unjudged,
)
from isobit.foundation.records import Provenance
from tests.reveal.kernels import blocks, chain, pairs, stripes, target_of

ORIGIN = Provenance(
    isobit="0.1.0",
    torch="2.13.0",
    python="3.11.4",
    cpu="a processor",
    engine="amx; avx512",
    command="isobit audit tiny-qwen3 --shape 8x24 --html audit.html",
    date="2026-11-16T00:00:00+00:00",
    digest="0123456789abcdef0123456789abcdef",
)
PATHS = (
    ("aten::mm", "self_attn.q_proj"),
    ("aten::mm", "self_attn.k_proj"),
    ("aten::mm", "self_attn.o_proj"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "self_attn"),
    ("aten::mean", "input_layernorm"),
    ("aten::mm", "mlp.gate_proj"),
    ("aten::mm", "mlp.up_proj"),
    ("aten::mm", "mlp.down_proj"),
)
SOURCES = {"mlp": "transformers/models/qwen3/modeling_qwen3.py:81"}


@lru_cache
def certificate(n=96, alone="blocks"):
    """A real certificate of two sums: in the batch in pairs of stripes, alone in blocks or as a chain."""
    branches = {
        "batch of 8": stripes(n, 8, pairs),
        "alone": blocks(n, 32, chain) if alone == "blocks" else chain(range(n)),
    }
    return isobit.reveal.compare_orders(lambda name: target_of(branches[name], n), list(branches))


def place_of(layer, at, call=0, backward=False):
    operator, path = PATHS[at % len(PATHS)]
    source = SOURCES.get(path.split(".")[0], "transformers/models/qwen3/modeling_qwen3.py:262")
    return Place(operator, f"model.layers.{layer}.{path}", source, call, backward)


def effect_of(differ=5, numbers=23, largest=3.0e-3, **others):
    return Effect("log-probabilities", numbers, differ, largest, **others)


def guilty_of(place, axis="batch", share=0.0, ulps=1, **others):
    values = {
        "elements": 4,
        "of": 36_864,
        "largest": 0.0009765625 * (ulps or 1),
        "kind": "order",
        "accuracy": Accuracy("fp64", 0.31, 0.28, 0.27),
        "first": FirstDifference((3, 511), 0.140625, 0.1396484375, "0x3e10", "0x3e0f"),
        "shapes": ("(192, 512) @ (512, 1536) bf16", "(24, 512) @ (512, 1536) bf16"),
        "effect": effect_of(5 if share else 0, largest=3.0e-3 * (share or 0)),
        "why_no_order": "it was not asked for",
        "remedy": "isobit.linear adds in one order for every batch",
        "price": 1.02,
    }
    return Guilty(place, axis, ulps=ulps, share=share, **{**values, **others})


def batch_axis(layers=4, guilty=18, lead=0.98):
    """An axis with one operator that makes nearly all of the effect."""
    every = [place_of(layer, at) for layer in range(layers) for at in range(len(PATHS))]
    step = max(1, len(every) // guilty)
    places = [replace(place, call=10 * at) for at, place in enumerate(every)][::step][:guilty]
    left, found = 1.0 - lead, []
    for at, place in enumerate(places[: guilty - 1]):
        share = left / 2 if at < 6 else 0.0
        left -= share
        orders = {"orders": certificate(), "why_no_order": ""} if "mm" in place.operator else {}
        found.append(guilty_of(place, share=share, ulps=1 + (3**at) % 40, **orders))
    first = Place(
        "aten::mm", f"model.layers.{layers - 1}.mlp.up_proj", "modeling_qwen3.py:81", 5_000
    )
    first = guilty_of(first, share=lead + left, ulps=2, orders=certificate(alone="chain"))
    unjudged = [
        Unjudged(
            Place("aten::index_add_", f"model.layers.{layer}.mlp.experts", "", 9), "batch", why
        )
        for layer in range(layers)
        for why in ("rows are sorted by expert", "rows are sorted by expert", "no fake kernel")
    ]
    return AxisReport(
        axis="batch",
        variation="sample 0 of 8 runs alone",
        sides=("batch of 8", "alone"),
        operators=100 * layers,
        exact=30 * layers,
        judged=67 * layers,
        guilty=(first, *sorted(found, key=lambda one: -one.share)),
        unjudged=tuple(unjudged),
        carriers=100,
        effect=effect_of(k3=2.1e-7, flips=0, positions=23, outside=0.0),
        remaining=effect_of(0, largest=0.0),
        complete=True,
        forwards=20,
        seconds={"forward": 0.1, "find": 0.4, "rank": 2.0},
    )


def clean_axis(axis="padding", **others):
    values = {"operators": 388, "exact": 161, "judged": 227, "complete": True}
    values |= {"effect": effect_of(0, largest=0.0, k3=0.0, flips=0, positions=23, outside=0.0)}
    values |= {"variation": "8 tokens of padding", "sides": ("left padding", "no padding")}
    return AxisReport(axis, **{**values, **others})


def audit_of(*axes, **others):
    values = {"model": "tiny-qwen3", "inputs": "8 samples of 24 tokens", "provenance": ORIGIN}
    return Audit(axes=axes, **{**values, **others})


def random_axis():
    dropout = Place("aten::native_dropout", "model.layers.0.mlp.dropout", "my_model.py:12", 7)
    nothing = Accuracy("none")
    one = guilty_of(dropout, "repeat", 1.0, None, kind="random", accuracy=nothing, first=None)
    sides = ("first run", "second run")
    return AxisReport(
        "repeat", "the same run twice", sides, 388, 161, 227, (one,), effect=effect_of(23, largest=0.4),
        complete=True,
    )  # fmt: skip


def error_axis():
    wrong = Place("custom::grouped_mm_backward", "experts.3", "kernels/moe.py:201", 40, True)
    one = guilty_of(
        wrong,
        share=1.0,
        ulps=900_000,
        kind="error",
        accuracy=Accuracy("fp64", 912.4, 0.4),
        effect=Effect("gradients", 4096, 512, 0.7),
        price=None,
        remedy="",
        first=FirstDifference((0,), float("nan"), 1.5, "0x7fc00000", "0x3fc00000"),
    )
    return AxisReport(
        "batch", "sample 0 of 8 runs alone", ("batch of 8", "alone"), 50, 20, 30, (one,),
        effect=Effect("gradients", 4096, 512, 0.7), complete=True,
    )  # fmt: skip


def rich():
    """Four axes, one of them with two guilty operators and by class, and one that was skipped."""
    decode = (
        guilty_of(place_of(1, 3, 30), "decode", 1.25, 4),
        guilty_of(place_of(2, 3, 60), "decode", -0.25, 2),
    )
    groups = (Group("aten::mm in model.layers.*.mlp.up_proj", 2, 1.0, effect_of(2, 20, 1e-4)),)
    decode_axis = clean_axis(
        "decode", guilty=decode, effect=effect_of(2, 20, 1e-4, k3=1e-9, flips=1, positions=20, outside=0.05),
        variation="the last 4 tokens are decoded from a cache", sides=("prefill", "decoded"), groups=groups,
        grouped_by="class", complete=False, why_not="the cache of layer 0 is not followed",
        remaining=effect_of(1, 20, 1e-6),
    )  # fmt: skip
    repeat = clean_axis("repeat", variation="the same run twice", sides=("first", "second"))
    skipped = (Skipped("threads", "this machine has one processor"),)
    return audit_of(batch_axis(), clean_axis(), decode_axis, repeat, skipped=skipped)


def many():
    """Sixty layers and 400 guilty operators."""
    return audit_of(batch_axis(layers=60, guilty=400, lead=0.4))
