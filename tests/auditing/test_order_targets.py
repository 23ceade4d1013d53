"""The order of a recorded call is that of the operator at that very shape, whatever its values were.

Two shapes with two orders give two classes, one order gives one, and what is no tree of additions gives a reason.
"""

import pytest
import torch
import torch.nn.functional as F

import isobit
import tests.auditing.planted_operators  # noqa: F401 (it registers isobit_planted)
from isobit.auditing.orders.order_pictures import reveal_both
from isobit.auditing.replay.call import Call, spec_of
from isobit.order.addition import chain, digest
from isobit.reveal import order, targets
from tests.auditing.recorded_calls import DTYPES, NAMES, Recorder, both, empty, record, trees

aten, planted = torch.ops.aten, torch.ops.isobit_planted

# Real calls, recorded by a dispatch mode


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_recorded_linear_has_the_orders_of_stock(dtype, bias):
    """At each shape the tree is that of a target of the same shape; this machine decides whether they differ."""
    layer = torch.nn.Linear(96, 64, bias=bias, dtype=dtype)
    x = torch.randn(8, 96, dtype=dtype)
    name = "aten::addmm" if bias else "aten::mm"
    calls = [record(name, layer, part) for part in (x, x[3:4])]
    certificate, text = reveal_both(*calls, NAMES, rows=(3, 0))
    found = trees(certificate)
    if not bias:
        for m, row, one in ((8, 3, "batch of 8"), (1, 0, "alone")):
            assert found[one] == order(targets.linear(96, m, 64, dtype, row=row))
    assert certificate.count == 2
    assert all(tree.replayed for tree in found.values())
    assert (len(certificate.classes) == 2) == ("two orders" in text or "other arithmetic" in text)


def test_stock_products_differ_between_one_row_and_eight():
    """The control: among usual shapes there is one with two orders, so that the others could have been found."""
    found = []
    for dtype in DTYPES:
        for k in (64, 512):
            weight = empty(k, k, dtype=dtype).t()
            run, alone = ((empty(m, k, dtype=dtype), weight) for m in (8, 1))
            certificate, text = both(aten.mm.default, run, alone, rows=(4, 0))
            assert certificate is not None, text
            found.append(len(certificate.classes))
    assert 2 in found


def test_values_are_neither_read_nor_changed():
    layer = torch.nn.Linear(32, 16, bias=False)
    weight = layer.weight.detach().clone()
    x = torch.full((8, 32), torch.nan)
    run, alone = (record("aten::mm", layer, part) for part in (x, x[:1]))
    certificate, text = reveal_both(run, alone, NAMES)
    assert certificate is not None, text
    assert torch.equal(layer.weight, weight)
    assert bool(x.isnan().all())


def test_specs_serve_instead_of_tensors():
    x, weight = empty(8, 32), empty(16, 32).t()
    calls = [Call(aten.mm.default, (spec_of(part), spec_of(weight)), {}) for part in (x, x[:1])]
    plain = [Call(aten.mm.default, (part, weight), {}) for part in (x, x[:1])]
    assert trees(reveal_both(*calls, NAMES)[0]) == trees(reveal_both(*plain, NAMES)[0])


def test_a_recorded_layer_norm_gives_a_reason():
    norm, x = torch.nn.LayerNorm(64), torch.randn(8, 64)
    calls = [record("aten::native_layer_norm", norm, part) for part in (x, x[:1])]
    certificate, reason = reveal_both(*calls, NAMES)
    assert certificate is None
    assert "not a plain sum" in reason


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_recorded_attention(dtype, causal):
    q = torch.randn(8, 2, 20, 32, dtype=dtype)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    calls = [record(name, attend, part) for part in (q, q[3:4])]
    certificate, text = reveal_both(*calls, NAMES, rows=(3, 0))
    assert certificate is not None, text
    assert {tree.n for tree in trees(certificate).values()} == {20}
    assert trees(certificate)["alone"].order_digest == (
        order(targets.attention(20, 20, dtype, heads=2, width=32)).order_digest
    )


def test_attention_of_one_cached_query_against_the_whole_prefix():
    name, k = aten._scaled_dot_product_flash_attention_for_cpu.default, 600
    whole = tuple(empty(1, 2, k, 16) for _ in range(3))
    cached = (whole[0][:, :, -1:], *whole[1:])
    prefix = Call(name, (*whole, 0.0, True), {})
    certificate, text = reveal_both(
        prefix, Call(name, cached, {}), ("prefill", "decode"), rows=((0, 1, k - 1, 3), (0, 1, 0, 3))
    )
    assert certificate is not None, text
    assert {tree.n for tree in trees(certificate).values()} == {k}


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_recorded_softmax(name):
    x = torch.randn(8, 3, 50)
    calls = [record(f"aten::_{name}", getattr(torch, name), part, -1) for part in (x, x[3:4])]
    certificate, text = reveal_both(*calls, NAMES, rows=(3, 0))
    assert certificate is not None, text
    wanted = order(getattr(targets, name)(50, 3)).order_digest
    assert trees(certificate)["alone"].order_digest == wanted


def test_a_softmax_of_few_bits_gives_a_reason():
    x = empty(8, 64, dtype=torch.bfloat16)
    certificate, reason = both(aten._softmax.default, (x, -1, False), (x[:1], -1, False))
    assert certificate is None
    assert "hides its order" in reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_linear_of_isobit_has_one_order(dtype):
    weight, x = torch.randn(48, 96, dtype=dtype), torch.randn(8, 96, dtype=dtype)
    calls = [record("isobit::linear", isobit.linear, part, weight) for part in (x, x[3:4])]
    certificate, text = reveal_both(*calls, NAMES, rows=(3, 0))
    assert certificate.kept, text
    assert certificate.classes[0].tree == order(
        targets.linear(96, 1, 48, dtype, function=isobit.linear)
    )
    assert "the same order" in text


# Planted operators of known order


def product(name, **options):
    func = getattr(planted, name).default
    more = (empty(6),) if name == "bias_by_rows" else ()
    run, alone = ((empty(m, 24), empty(6, 24), *more) for m in (8, 1))
    return both(func, run, alone, **options)


def test_split_k_by_rows_has_two_orders():
    certificate, text = product("split_k_by_rows")
    found = trees(certificate)
    assert found["alone"].branch == chain(range(24))
    assert found["batch of 8"].branch == (chain(range(12)), chain(range(12, 24)))
    assert "two orders" in text
    assert certificate.classes[1].parting is not None


def test_one_chain_has_one_order():
    certificate, text = product("one_chain")
    assert certificate.kept
    assert certificate.classes[0].tree.branch == chain(range(24))
    assert "the same order" in text


def test_a_compensated_sum_gives_a_reason():
    certificate, reason = product("compensated")
    assert certificate is None
    assert "not a tree of additions" in reason


def test_a_random_order_gives_a_reason():
    certificate, reason = product("random_order")
    assert certificate is None
    assert "not repeatable" in reason


def test_where_the_bias_is_added_is_part_of_the_order():
    certificate, text = product("bias_by_rows")
    assert len(certificate.classes) == 2, text
    found = trees(certificate)
    assert found["alone"].branch == chain(range(25))
    assert found["batch of 8"].order_digest == digest(chain([24, *range(24)]))


def test_an_element_that_adds_differently_is_found():
    certificate, text = product("other_order_in_last_column")
    assert len(certificate.classes) == 2, text
    assert "[0, 5]" in text


def test_a_branch_on_values_is_said_to_be_another_cause():
    certificate, text = product("branch_on_values")
    assert len(certificate.classes) == 1
    assert "another cause" in text
    assert "if it does not branch" in text


def test_a_planted_norm():
    certificate, text = both(planted.row_norm.default, (empty(8, 24),), (empty(1, 24),))
    assert len(certificate.classes) == 2, text
    found = trees(certificate)
    assert found["batch of 8"].branch == (chain(range(12)), chain(range(12, 24)))


def test_an_operator_that_writes_to_its_argument():
    into = torch.ones(5)
    args = (into, empty(20, 5))
    certificate, text = both(planted.add_rows_.default, args, args, rows=(2, 2))
    assert certificate is not None, text
    assert certificate.classes[0].tree.branch == chain(range(20))
    assert "where it adds into is the same" in text
    assert torch.equal(into, torch.ones(5))


# The rest of the interface


def test_a_short_budget_gives_a_reason_with_figures():
    weight = empty(512, 512).t()
    certificate, reason = both(
        aten.mm.default, (empty(8, 512), weight), (empty(1, 512), weight), budget=0.001
    )
    assert certificate is None
    assert "not revealed within 0.001 s" in reason
    assert " ms each" in reason


def test_progress_is_reported():
    stages = []
    x, weight = empty(8, 32), empty(32, 16)
    both(aten.mm.default, (x, weight), (x[:1], weight), progress=lambda *now: stages.append(now[0]))
    assert "replay" in stages


def test_threads_are_set_and_restored():
    seen = []

    @torch.library.custom_op("isobit_planted::by_threads", mutates_args=())
    def by_threads(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x.sum(-1) if seen[-1] == 1 else x[:, :8].sum(-1) + x[:, 8:].sum(-1)

    before = torch.get_num_threads()
    func, x = planted.by_threads.default, empty(1, 24)
    certificate, _ = both(func, (x,), (x,), threads=(1, 2))
    assert len(certificate.classes) == 2
    assert set(seen) == {1, 2}
    assert torch.get_num_threads() == before


def test_it_can_be_called_inside_a_dispatch_mode():
    x, weight = empty(8, 32), empty(32, 16)
    with Recorder("aten::mm") as recorder:
        certificate, text = both(aten.mm.default, (x, weight), (x[:1], weight))
    assert certificate is not None, text
    assert not recorder.calls


def test_expanded_and_transposed_arguments():
    weight = empty(24, 40).t().expand(8, 40, 24)
    run, alone = ((empty(m, 5, 40), weight[:m]) for m in (8, 1))
    certificate, text = both(aten.bmm.default, run, alone, rows=(5, 0))
    assert certificate is not None, text
    assert {tree.n for tree in trees(certificate).values()} == {40}
