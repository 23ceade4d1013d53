"""Reports of certificates: verdicts with denominators, causes, pages that nothing in a record can break."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from isobit.certifying.records import Configuration, ExpressionClass, Step
from isobit.certifying.report.drawings import as_tree, describe_order, gather_steps, is_drawable
from isobit.certifying.report.json import certificate_as_json
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import describe_certificate
from isobit.certifying.report.words import conclude, counted, describe_members, find_causes, letter
from isobit.order.addition import chain, digest
from tests.report import fake_certificates as fakes
from tests.report.test_audit_page import Outline

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b[31m\u202e"


@pytest.mark.parametrize("name", fakes.CASES)
def test_pages_are_well_formed_offline_and_repeatable(name):
    page = write_certificate_page(fakes.CASES[name]())
    assert page == write_certificate_page(fakes.CASES[name]())
    found = Outline(page)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"src=.?(?:http|//)|@import|url\(", page)  # links are not fetched
    assert found.tags.count("script") == 1  # data, not code
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)
    data = re.search(r'<script type="application/json" id="certificate">(.*)</script>', page)
    assert json.loads(data[1]) == json.loads(certificate_as_json(fakes.CASES[name]()))


@pytest.mark.parametrize("name", fakes.CASES)
def test_the_verdict_is_the_same_in_every_form(name):
    found = fakes.CASES[name]()
    sentence = conclude(found)
    record = json.loads(certificate_as_json(found))
    assert record["format"] == "isobit certificate 1"
    assert record["conclusion"] == sentence
    assert record["exit_code"] == found.exit_code
    assert record["kept"] is found.kept is (found.exit_code == 0)
    text = describe_certificate(found)
    assert sentence.split()[0] in text
    assert " ".join(sentence.split()) in " ".join(text.split())


def test_sentences_have_denominators():
    assert "all 36 configurations (4 row counts × 3 BLOCK_M × 3 targets)" in conclude(fakes.kept())
    assert "117,504 names compared." in conclude(fakes.kept())
    assert "sm_90 and sm_100: the same expression" in conclude(fakes.kept())
    apart = conclude(fakes.split_by_rows())
    assert apart.startswith("3 expressions on each target in 12 configurations")
    assert "depends on the number of rows" in apart
    assert "depends on num_warps." in conclude(fakes.by_block())  # and not on BLOCK_M or rows
    assert "rows of one call differ" in conclude(fakes.rows_differ())
    assert "In all 12 configurations" in conclude(fakes.atomics())
    assert conclude(fakes.refused()).startswith("No verdict on 2 of 4 configurations")
    assert "compared" not in conclude(fakes.empty())


def test_one_configuration_is_compared_with_nothing():
    target = fakes.target_of("sm_90", lambda rows, settings: 0, rows=(1,))
    assert "nothing to compare it with" in conclude(fakes.certified([target], rows=(1,)))


def test_a_refused_configuration_beside_kept_ones_is_not_kept():
    assert fakes.refused().exit_code == 2
    assert fakes.atomics().exit_code == 1
    assert fakes.empty().exit_code == 2


def test_text_names_lines_and_remedies():
    text = describe_certificate(fakes.split_by_rows())
    assert "matmul.py:71  total += tl.load" in text
    assert "PTX line 412  mma.sync.aligned" in text
    assert "rows 1, 3" in text
    assert "4 × (4 × (16 fused), then folded), then folded" in text
    text = describe_certificate(fakes.atomics())
    assert "remedy: write partial sums to a buffer" in text
    assert "at matmul.py:107, PTX line 300" in text
    assert describe_certificate(fakes.empty()).count("what-a-certificate-covers") == 1


def test_causes_are_what_alone_changes_the_expression():
    vary = (("BLOCK_M", ("16", "64")), ("num_warps", ("4", "8")))

    def both(rows, settings):
        return 2 * (settings["BLOCK_M"] == "64") + (rows > 1)

    target = fakes.target_of("sm_90", both, rows=(1, 3), settings=vary)
    assert find_causes(target) == ["rows", "BLOCK_M"]


def test_classes_have_short_names():
    every = [
        Configuration("sm_90", rows, (("B", block), ("W", warps)))
        for rows in (1, 3, 70)
        for block in ("16", "64")
        for warps in ("4", "8")
    ]

    def named(test):
        return describe_members([one for one in every if test(one, dict(one.settings))], every)

    assert named(lambda one, s: True) == "all"
    assert named(lambda one, s: s["B"] == "16") == "B 16"
    assert named(lambda one, s: s["B"] == "16" and one.rows < 70) == "rows 1, 3; B 16"
    mixed = named(lambda one, s: s["B"] == "16" or one.rows == 70)
    assert mixed == "rows 1, 3 with B 16 or rows 70"
    odd = named(lambda one, s: (one.rows + int(s["B"]) + int(s["W"])) % 12 in (1, 3, 9, 6))
    assert odd  # whatever it is, something is said


def test_a_class_of_nearly_all_is_named_by_what_it_lacks():
    every = [Configuration("sm_90", 1, (("W", str(2**at)),)) for at in range(6)]
    assert describe_members(every[1:], every) == "W all but 1"
    assert describe_members(every[2:], every) == "W 4, 8, 16, 32"


def test_letters_and_counts():
    assert [letter(at) for at in (0, 25, 26, 52)] == ["A", "Z", "A2", "A3"]
    assert (counted(1, "row"), counted(2000, "entry")) == ("1 row", "2,000 entries")


def test_tensor_core_steps_are_drawn_as_groups():
    branch = fakes.fused_chain(0, 64)
    assert len(branch) == 17
    assert describe_order(branch) == "4 × (16 fused), then folded"
    assert gather_steps(chain(range(8))) == chain(range(8))  # additions of two stay as they are
    assert digest(as_tree(branch).branch) != digest(branch)  # so digests are of the order itself
    assert not is_drawable(None)
    assert not is_drawable((0, 2))  # a term is missing
    assert not is_drawable((0, (0, 1)))  # a term twice


def test_json_has_orders_as_words_and_no_deep_lists():
    record = json.loads(certificate_as_json(fakes.split_by_rows()))
    order = record["targets"][0]["classes"][0]["order"]
    steps = order.pop("steps")
    assert order == {
        "words": "4 × (4 × (16 fused), then folded), then folded",
        "digest": digest(fakes.split(4)),
        "terms": 256,
        "first_step": 256,
    }
    assert steps[0] == list(range(16))
    assert len(steps) == 16 + 3
    deep = ExpressionClass("0a" * 16, (), chain(range(20_000)))
    found = fakes.certified([replace(fakes.kept().targets[0], classes=(deep,))])
    assert "20000" in certificate_as_json(found)


def test_nothing_in_a_record_becomes_markup_or_controls_a_terminal():
    found = fakes.split_by_rows()
    target = found.targets[0]
    step = Step(HOSTILE, HOSTILE, 3, HOSTILE, (HOSTILE, 4), HOSTILE)
    hostile = replace(
        target,
        target=HOSTILE,
        classes=tuple(replace(one, formula=HOSTILE, tree=None) for one in target.classes),
        partings=(replace(target.partings[0], left_step=step, output=HOSTILE, detail=HOSTILE),),
        kernels=(fakes.facts(HOSTILE, HOSTILE, options=HOSTILE, tensor_core={HOSTILE: 1}),),
        outcomes=tuple(
            replace(one, configuration=replace(one.configuration, settings=((HOSTILE, HOSTILE),)))
            for one in target.outcomes
        ),
    )
    broken = replace(fakes.atomics().targets[0], target=HOSTILE)
    broken = replace(
        broken,
        outcomes=tuple(
            replace(one, reason=HOSTILE, remedy=HOSTILE, where=HOSTILE) for one in broken.outcomes
        ),
    )
    found = replace(found, function=HOSTILE, targets=(hostile, broken), notes=(HOSTILE,))
    page = write_certificate_page(found)
    outline = Outline(page)
    assert "img" not in outline.tags
    assert outline.tags.count("script") == 1
    assert "\x1b" not in page
    assert "\u202e" not in page
    text = describe_certificate(found)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert json.loads(certificate_as_json(found))["function"] == HOSTILE


def test_a_letter_is_one_expression_on_all_targets():
    """Targets whose expressions differ have different letters, and share them where they share expressions."""
    rows, vary = (1, 3), (("BLOCK_M", ("16", "64")),)
    first = fakes.target_of("sm_80", lambda rows, s: 0, rows=rows, settings=vary)
    same = fakes.target_of("sm_90", lambda rows, s: 0, rows=rows, settings=vary)
    other = fakes.target_of("sm_100", lambda rows, s: 1, rows=rows, settings=vary)
    page = write_certificate_page(fakes.certified((first, same, other), vary=vary, rows=rows))
    cells = dict(re.findall(r'title="(sm_\d+) .*?">([A-Z])', page))
    assert cells == {"sm_80": "A", "sm_90": "A", "sm_100": "B"}
    legend = re.search("the same letter on two targets.*?</p>", page)[0]
    assert "sm_80, sm_90" in legend
    assert legend.count("<code>") == 2
    text = describe_certificate(fakes.certified((first, other), vary=vary, rows=rows))
    assert "Expressions" not in text  # one expression each


def test_matrix_instructions_are_named_and_their_equality_is_a_model():
    rows, vary = (1, 3), (("BLOCK_M", ("16", "64")),)
    target = fakes.target_of("sm_90", lambda rows, s: 0, rows=rows, settings=vary)
    kernels = (
        fakes.facts(target="sm_90", tensor_core={"mma.sync.aligned.m16n8k16": 4}),
        fakes.facts(target="sm_90", tensor_core={"wgmma.mma_async.sync": 4}),
    )
    outcomes = tuple(
        replace(one, kernels=(int(dict(one.configuration.settings)["BLOCK_M"] == "64"),))
        for one in target.outcomes
    )
    mixed = fakes.certified(
        [replace(target, outcomes=outcomes, kernels=kernels)], vary=vary, rows=rows
    )
    said = " ".join(describe_certificate(mixed).split())
    assert "if mma.sync and wgmma.mma_async round alike, as MMA-Sim's model has it" in said
    assert "mma.sync in BLOCK_M 16; wgmma.mma_async in BLOCK_M 64" in said
    # So it is said if targets differ, and if bits may differ between targets.
    apart = fakes.target_of("sm_80", lambda rows, s: 1, rows=rows, settings=vary)
    both = replace(target, outcomes=outcomes, kernels=kernels)
    found = fakes.certified([apart, both], vary=vary, rows=rows)
    assert "on each target in all 8 configurations" in conclude(found)
    assert "as MMA-Sim's model has it." in conclude(found)
    alike = fakes.target_of("sm_80", lambda rows, s: 0, rows=rows, settings=vary)
    own = tuple(replace(one, approximate=("ex2.approx.ftz.f32",)) for one in kernels)
    found = fakes.certified(
        [alike, replace(both, kernels=own)],
        vary=vary,
        rows=rows,
        groups=(("sm_80", "sm_90"),),
    )
    assert "as MMA-Sim's model has it. Between targets bits may differ" in conclude(found)
    alone = fakes.certified([replace(target, kernels=kernels[:1])], vary=vary, rows=rows)
    said = " ".join(describe_certificate(alone).split())
    assert "MMA-Sim" not in said
    assert "matrix products are made by mma.sync" in said
