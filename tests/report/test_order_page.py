"""Pictures and pages: well-formed, complete, offline, and safe against names."""

import re
from xml.etree import ElementTree

import pytest

import isobit
from isobit.reveal.certificate import OrderClass, OrderComparison
from isobit.reveal.report import draw_certificate, write_page
from isobit.reveal.tree import Tree
from tests.reveal.kernels import ORDERS, blocks, chain, pairs, target_of


def certificate_of(*branches, n, names=None):
    names = names or [f"m={i}" for i in range(len(branches))]
    classes = [
        OrderClass((name,), Tree("t", n, branch), None)
        for name, branch in zip(names, branches, strict=True)
    ]
    return OrderComparison(tuple(classes), ())


@pytest.mark.parametrize("n", [1, 2, 16, 33, 4096])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.sweep(25)
def test_every_order_is_drawn_in_its_frame(name, n):
    picture = draw_certificate(certificate_of(ORDERS[name](n), n=n), "title")
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    for line in root.iter("{http://www.w3.org/2000/svg}line"):
        for key in ("x1", "x2"):
            assert 0 <= float(line.get(key)) <= width
        for key in ("y1", "y2"):
            assert 0 <= float(line.get(key)) <= height
    assert len(picture) < 400_000


def test_small_trees_show_every_addition():
    picture = draw_certificate(certificate_of(pairs(range(16)), n=16))
    assert picture.count("<circle") == 16 + 15


def test_large_chains_are_one_bar():
    picture = draw_certificate(certificate_of(blocks(4096, 1024, pairs), n=4096))
    assert picture.count('class="bar same"') == 4
    assert picture.count(">chain of 1024<") == 4


def test_what_differs_is_coloured():
    alike = draw_certificate(certificate_of(blocks(512, 128, pairs), n=512))
    assert "differs" not in alike.split("</style>")[1]
    other = draw_certificate(
        certificate_of(blocks(512, 128, pairs), blocks(512, 256, pairs), n=512)
    )
    body = other.split("</style>")[1]
    assert "bar same" in body  # the first 128 terms are added alike
    assert "bar differs" in body


def test_a_page_is_offline_and_escaped():
    page = write_page(
        certificate_of(chain(range(40)), n=40, names=["<script>alert(1)</script>"]), "a <b> & c"
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r'(?:src|href)="http', page)
    assert "a &lt;b&gt; &amp; c" in page


def test_a_page_names_what_was_refused():
    found = isobit.reveal.compare_orders(
        lambda name: target_of(chain(range(9)), 9) if name else max, [1, 0], 9
    )
    page = write_page(found, "t")
    assert "could not be shown" in page
    assert "9 terms" in page or "chain of 9" in page
