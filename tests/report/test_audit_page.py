"""Pages of audits: complete, offline, well-formed, equal for equal records, and safe against every name in them."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import isobit
from isobit.auditing.records import AXES, FirstDifference, Place, Skipped, Unjudged
from isobit.auditing.report.json import audit_from_json
from isobit.auditing.report.page import DETAILED, show_bits, write_audit_page
from isobit.auditing.report.strip import (
    COLUMNS,
    draw_strip,
    families_of,
    in_words,
    layers_of,
    level_of,
)
from tests.report import fake_audits as fakes
from tests.reveal.kernels import chain, target_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b[31m\u202e"
CASES = {
    "rich": fakes.rich,
    "many": fakes.many,
    "error": lambda: fakes.audit_of(fakes.error_axis()),
    "random": lambda: fakes.audit_of(fakes.random_axis()),
    "clean": lambda: fakes.audit_of(fakes.clean_axis(), fakes.clean_axis("repeat")),
    "nothing judged": lambda: fakes.audit_of(fakes.clean_axis(judged=0, complete=False)),
    "no axis": lambda: fakes.audit_of(provenance=None),
}
VOID = {"meta", "img", "br", "wbr"}
UNCLOSED = {"td", "th", "tr", "li", "dt", "dd", "p"}  # their end tags may be left out


class Outline(HTMLParser):
    """Tags, ids, links and text of a page; raises if an element is closed that is not open."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.links, self.text, self.open = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        assert not [name for name in given if name.startswith("on")], given
        if tag not in VOID and tag not in UNCLOSED:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in UNCLOSED:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


def pictures_of(page):
    return re.findall(r"<svg.*?</svg>", page, re.DOTALL)


@pytest.mark.parametrize("name", CASES)
def test_pages_are_well_formed_offline_and_repeatable(name):
    audit = CASES[name]()
    page = write_audit_page(audit)
    assert page == write_audit_page(CASES[name]())
    found = Outline(page)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert not re.search(r"(?:src|href)=.?(?:http|//)|@import|url\(", page)
    assert found.tags.count("script") == 1  # data, not code
    assert '<script type="application/json" id="audit">' in page
    for picture in pictures_of(page):
        ElementTree.fromstring(picture)
        assert "aria-" in picture


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_its_own_data(name):
    audit = CASES[name]()
    data = re.search(r'id="audit">(.*?)</script>', write_audit_page(audit), re.DOTALL)[1]
    again = audit_from_json(data)
    assert again.guilty == () or again.guilty[0].place == audit.guilty[0].place
    assert again.exit_code == audit.exit_code
    assert [axis.seconds for axis in again.axes] == [axis.seconds for axis in audit.axes]
    write_audit_page(again)  # a page can be drawn again from the data of a page


def test_a_page_drawn_from_data_has_the_orders_as_words():
    data = re.search(r'id="audit">(.*?)</script>', write_audit_page(fakes.rich()), re.DOTALL)[1]
    page = write_audit_page(audit_from_json(data))
    assert "alone: chain of 96; fp32 sums" in page


def hostile():
    """An audit with a hostile text in every field that is one."""
    place = Place(HOSTILE, f"layers.0.{HOSTILE}", f"{HOSTILE}:3", 1)
    first = FirstDifference((1,), float("inf"), float("-inf"), HOSTILE, HOSTILE)
    texts = {"shapes": (HOSTILE, HOSTILE), "remedy": HOSTILE, "why_no_order": HOSTILE}
    effect = replace(fakes.effect_of(), quantity=HOSTILE)
    one = fakes.guilty_of(place, HOSTILE, 1.0, first=first, effect=effect, **texts)
    orders = isobit.reveal.certify(
        lambda name: target_of(chain(range(3)), 3) if name == HOSTILE else max,
        [HOSTILE, "other"],
        3,
    )
    other = fakes.guilty_of(place, HOSTILE, 0.0, orders=orders)
    axis = replace(
        fakes.batch_axis(),
        axis=HOSTILE,
        variation=HOSTILE,
        sides=(HOSTILE, HOSTILE),
        guilty=(one, other),
        unjudged=(Unjudged(place, HOSTILE, HOSTILE),),
        effect=effect,
        complete=False,
        why_not=HOSTILE,
        grouped_by=HOSTILE,
        groups=(fakes.Group(HOSTILE, 2, 1.0, effect),),
    )
    origin = replace(fakes.ORIGIN, command=HOSTILE, cpu=HOSTILE)
    skipped = (Skipped(HOSTILE, HOSTILE),)
    return fakes.audit_of(axis, model=HOSTILE, inputs=HOSTILE, skipped=skipped, provenance=origin)


def test_no_text_becomes_markup():
    page = write_audit_page(hostile())
    found = Outline(page)
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert "alert(1)" in "".join(found.text)  # shown, not lost
    assert "\x1b" not in page
    assert "\u202e" not in page
    for picture in pictures_of(page):
        ElementTree.fromstring(picture)


def test_what_the_page_must_say():
    text = " ".join("".join(Outline(write_audit_page(fakes.rich())).text).split())
    for words in (
        "18 of 268 judged operators depend on the batch",
        "makes 98 % of the effect (5 of 23 log-probabilities differ, by at most 3.0e-3)",
        "nothing else does: with all of them substituted",
        "not audited: this machine has one processor",
        "The shares add up to 100 %",
        "transformers/models/qwen3/modeling_qwen3.py:81",
        "isobit.linear adds in one order for every batch",
        "isobit's operator takes 1.02 times as long",
        "batch of 8 0.31, alone 0.28, isobit 0.27",
        "8 stripes of 12, folded, then pairs",
        "rows are sorted by expert",
        "no fake kernel",
        "isobit audit tiny-qwen3 --shape 8x24",
        "the cache of layer 0 is not followed",
        "Effects that were measured together",
        "A negative share",
        "Finding the operators took 4 times as long as one run.",
    ):
        assert words in text, words


def test_an_error_is_opened_first():
    audit = fakes.audit_of(fakes.batch_axis(), fakes.error_axis())
    page = write_audit_page(audit)
    first = page.partition('<details class="operator')[2]
    assert first.startswith(' bad" open><summary><b>custom::grouped_mm_backward')
    assert "error: this is a bug, not rounding" in first


def test_orders_are_drawn_once():
    page = write_audit_page(fakes.audit_of(fakes.batch_axis()))
    drawn = [picture for picture in pictures_of(page) if 'class="panel"' in picture]
    assert len(drawn) == 2  # those of the first operator, and those that all others share
    assert page.count("the same as drawn here") == 18 - 2 - 4  # 4 operators do not multiply


def test_many_guilty_operators_are_all_there_and_the_page_stays_small():
    audit = fakes.many()
    page = write_audit_page(audit)
    assert len(audit.guilty) == 400
    assert page.count('<details class="operator') == DETAILED
    assert f"{400 - DETAILED} other guilty operators" in page
    body = page.partition("<script")[0]
    assert all(f"model.layers.{one.place.layer}".split(".")[-1] in body for one in audit.guilty)
    assert body.count("4 of 36,864") >= 400
    assert len(page) < 2_000_000


def test_strips_keep_inside_their_frame():
    for layers, guilty in ((1, 4), (4, 18), (60, 400), (150, 900)):
        root = ElementTree.fromstring(draw_strip(fakes.batch_axis(layers, guilty)))
        width = float(root.get("width"))
        rectangles = list(root.iter("rect"))
        assert len(rectangles) == guilty
        corners = {(r.get("x"), r.get("y")) for r in rectangles}
        assert len(corners) == guilty  # no two on one another
        for one in rectangles:
            assert 300 <= float(one.get("x")) <= width - float(one.get("width"))
        assert all(r.find("title") is not None for r in rectangles)
    assert draw_strip(fakes.clean_axis()) == ""


def test_a_ring_grows_with_the_share_and_none_is_drawn_without():
    root = ElementTree.fromstring(draw_strip(fakes.batch_axis()))
    rings = [float(ring.get("r")) for ring in root.iter("circle")]
    shares = [one.share for one in fakes.batch_axis().guilty if one.share]
    assert len(rings) == len(shares)
    assert max(rings) > 2 * sorted(rings)[-2]  # 98 % against 1 %


def test_layers_have_no_gaps_and_no_number_makes_a_million_of_them():
    layers = ["model.layers.10.mlp", "model.layers.2.mlp", "lm_head", "model.layers.2"]
    places = [Place("aten::mm", path, call=at) for at, path in enumerate(layers)]
    assert layers_of(places) == [*(f"model.layers.{n}" for n in range(11)), "lm_head"]
    far = [Place("aten::mm", "layers.999999999.mlp"), Place("aten::mm", f"layers.{10**30}")]
    assert len(layers_of(far)) == 2
    places = [Place("aten::mm", f"layers.{n}.x", call=n) for n in range(COLUMNS + 40)]
    axis = replace(fakes.batch_axis(), guilty=tuple(map(fakes.guilty_of, places)))
    assert draw_strip(axis).count("<rect") == COLUMNS


def test_rows_are_in_the_order_of_a_layer():
    calls = {"0.o": 7, "0.up": 9, "1.q": 21, "1.o": 27, "1.up": 29, "head": 40}
    places = [Place("aten::mm", path, call=call) for path, call in calls.items()]
    axis = replace(fakes.batch_axis(), guilty=tuple(map(fakes.guilty_of, places)))
    rows = [name.removeprefix("aten::mm in ") for name in families_of(axis)]
    assert rows == ["*.q", "*.o", "*.up", "head"]
    assert in_words(axis)[0] == ("aten::mm in *.o", "0, 1", "1", "0 %")


def test_colours_are_logarithmic():
    assert [level_of(n) for n in (1, 2, 3, 4, 15, 16, 255, 256, 65_536, 2**40)] == [
        0, 1, 1, 2, 2, 3, 3, 4, 5, 5,
    ]  # fmt: skip


def test_bits_that_differ_are_marked():
    one = fakes.guilty_of(Place("aten::mm"))
    shown = show_bits(one, ("batch", "alone"))
    assert "3e<mark>10</mark>" in shown
    assert "0011 1110 000<mark>1</mark> <mark>0000</mark>" in shown
    assert "5 differing bits" in shown
    odd = replace(one, first=replace(one.first, run_bits="<b>", variant_bits="0x3e10"))
    assert "&lt;b&gt;" in show_bits(odd, ("batch", "alone"))
    lengths = replace(one, first=replace(one.first, run_bits="0x3e", variant_bits="0x3e10"))
    assert "<mark>" not in show_bits(lengths, ("batch", "alone"))


@pytest.mark.parametrize("axis", [*AXES, "an axis of later"])
def test_every_axis_has_a_page(axis):
    axis_report = replace(fakes.batch_axis(), axis=axis)
    assert f"<b>{axis}</b>" in write_audit_page(fakes.audit_of(axis_report))
