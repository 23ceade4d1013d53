"""Certificates: classes, the place where two orders part, and a self-check that can fail."""

import pytest
import torch

import isobit
from isobit.order.addition import chain, digest, find_difference, steps_of, write_formula
from isobit.reveal import certificate, targets
from isobit.reveal import certificate as certificates
from isobit.reveal.certificate import PlainSum
from isobit.reveal.replays import Replayed
from isobit.reveal.tree import Tree
from tests.reveal.kernels import add_by, blocks, pairs, random_branch, stripes, target_of


def by_rows(m):
    """A kernel that chooses its order from the batch: what certificates are for."""
    return target_of(chain(range(64)) if m < 16 else blocks(64, 16, pairs), 64)


def test_one_order_is_one_class():
    found = isobit.reveal.compare_orders(lambda m: target_of(pairs(range(64)), 64), [1, 2, 64])
    assert found.kept
    assert found.count == 3
    assert found.digest == found.classes[0].tree.digest
    assert found.matches(digest(pairs(range(64))))
    assert not found.matches(digest(chain(range(64))))
    assert "for all finite inputs" in found.claim


def test_an_order_chosen_from_the_batch_is_two_classes():
    found = isobit.reveal.compare_orders(by_rows, [1, 8, 16, 64])
    assert not found.kept
    assert found.digest is None
    assert found.claim == "no claim"
    assert [c.configurations for c in found.classes] == [("1", "8"), ("16", "64")]
    assert found.classes[1].parting == ("(terms 0–15) + term 16", "(terms 0–15) + (terms 16–31)")


def test_equal_orders_with_other_arithmetic_are_two_classes():
    def narrow(a, b):
        return (a + b).bfloat16().float()

    found = isobit.reveal.compare_orders(
        lambda m: target_of(chain(range(40)), 40, add=narrow if m else torch.add), [0, 1]
    )
    assert len(found.classes) == 2
    assert found.classes[1].parting is None
    assert found.classes[0].tree.order_digest == found.classes[1].tree.order_digest


def test_what_cannot_be_shown_is_named():
    found = isobit.reveal.compare_orders(lambda name: getattr(torch, name), ["sum", "amax"], 20)
    assert not found.kept
    assert [name for name, _ in found.refused] == ["amax"]
    assert found.count == 2
    assert found.summary()["refused"][0]["configuration"] == "amax"


def test_no_configuration_is_refused():
    with pytest.raises(isobit.ArgumentError, match="certify nothing"):
        isobit.reveal.compare_orders(by_rows, [])


def test_keywords_name_what_varies():
    found = isobit.reveal.compare_orders(targets.sum, [{"k": 40, "m": m} for m in (1, 2, 3, 5)])
    assert found.classes[0].label == "m=1–3, 5"


def test_the_self_check_can_fail(monkeypatch):
    wrong = Tree("planted", 33, chain(range(33)), replays=Replayed(8))
    monkeypatch.setattr(certificate, "reveal", lambda target, **_: wrong)
    with pytest.raises(isobit.EngineError, match="planted order"):
        certificates.compare_orders(by_rows, [1])


def test_the_self_check_wants_the_compensated_sum_refused(monkeypatch):
    plain = PlainSum(
        "plain", 33, lambda values: add_by(chain(range(33)), torch.tensor(values)).item()
    )
    monkeypatch.setattr(certificate, "plant_compensated", lambda n: plain)
    with pytest.raises(isobit.EngineError, match="compensated"):
        certificate.check_revealing()


def test_parting_of_equal_orders_is_none():
    branch = random_branch(50, 3)
    assert find_difference(branch, branch) is None
    assert find_difference(((0, 1), 2), (2, (1, 0))) is None
    assert find_difference(((0, 1), 2), ((0, 2), 1)) == ("term 0 + term 1", "term 0 + term 2")


def test_deep_orders_do_not_recurse():
    deep = chain(range(50_000))
    assert len(steps_of(deep)) == 49_999
    assert str(Tree("deep", 50_000, deep)) == "chain of 50000"
    assert find_difference(deep, chain(range(49_999, -1, -1))) is not None


@pytest.mark.parametrize(
    ("branch", "n", "words"),
    [
        (chain(range(64)), 64, "chain of 64"),
        (chain(range(63, -1, -1)), 64, "chain of 64, descending"),
        (stripes(1024, 16, pairs), 1024, "16 stripes of 64, folded, then pairs"),
        (stripes(64, 4, chain), 64, "4 stripes of 16, folded, then folded"),
        (blocks(1024, 256, pairs), 1024, "4 chains of 256, then pairs"),
        (blocks(1024, 384, chain), 1024, "(2 chains of 384, then pairs) + (chain of 256)"),
        (pairs(range(64)), 64, "64 in pairs"),
        (tuple(range(9)), 9, "9 fused"),
        (5, 1, "1 term"),
        (((0, 3), (2, 1)), 4, "(0 + 3) + (2 + 1)"),
    ],
)
def test_words(branch, n, words):
    if n == 4:
        assert write_formula(branch) == words
    else:
        assert str(Tree("", n, branch)) == words


@pytest.mark.parametrize("seed", range(20))
def test_any_order_has_words_and_all_its_terms(seed):
    from isobit.reveal.outline import outline_of

    n = 20 + seed * 7
    branch = random_branch(n, seed)
    assert outline_of(branch).size == n
    assert str(Tree("", n, branch))
