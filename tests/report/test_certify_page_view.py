"""What a reader sees of a certificate's page: denominators, readable colours, one card per reason, every target."""

import re
from dataclasses import replace

import pytest

from isobit.certifying.records import EXECUTED
from isobit.certifying.report import drawings as certify_map
from isobit.certifying.report.page import write_certificate_page
from isobit.certifying.report.text import gather_failures
from isobit.certifying.report.words import conclude
from tests.report import fake_certificates as fakes


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(share * p for share, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_letters_can_be_read_on_their_colours():
    light, dark = certify_map.MAP_STYLE.split("@media", 1)
    for text, ground in (("ffffff", light), ("14171d", dark)):
        colours = re.findall(r"--c\d:#([0-9a-f]{6})", ground)
        assert len(colours) == certify_map.COLOURS
        assert min(contrast(text, each) for each in colours) >= 4.5  # WCAG 2, level AA
    assert contrast("ffffff", "b8922a") < 4.5  # so the check can fail


def test_every_expression_says_how_many_of_all_configurations_have_it():
    page = write_certificate_page(fakes.split_by_rows())
    assert re.search(r'<td class="figure">\d+ of 4<', page)
    assert not re.search(r'<td class="figure">\d+<', page)


def test_targets_with_other_expressions_are_not_shown_as_one():
    found = fakes.kept()
    first, *others = found.targets
    assert "<h3>On sm_80, sm_90 and sm_100</h3>" in write_certificate_page(found)
    first = replace(first, classes=(replace(first.classes[0], digest="7e" * 16),))
    page = write_certificate_page(replace(found, targets=(first, *others)))
    for target in (first, *others):
        assert f"<code>{target.classes[0].digest[:16]}</code>" in page
    assert "<h3>On sm_80</h3>" in page
    assert "<h3>On sm_90 and sm_100</h3>" in page
    assert page.count("Terms run along") == 1


def test_pictures_are_apart_so_that_a_narrow_page_can_stack_them():
    page = write_certificate_page(fakes.split_by_rows())
    widths = [int(w) for w in re.findall(r'<svg[^>]* width="(\d+)"', page)]
    assert len(widths) > 1
    assert max(widths) < 600


def test_one_reason_is_one_card_whatever_the_target_and_line():
    found = fakes.atomics()
    lines = iter(range(1, 100))
    targets = tuple(
        replace(
            target,
            outcomes=tuple(
                replace(one, where=f"matmul.py:107, PTX line {next(lines)}")
                for one in target.outcomes
            ),
        )
        for target in found.targets
    )
    (failure,) = gather_failures(replace(found, targets=targets))
    assert failure.labels == [target.target for target in targets]
    assert failure.where == "matmul.py:107, PTX line 1 (and 11 more places)"
    assert write_certificate_page(replace(found, targets=targets)).count('class="card bad"') == 1


def test_instructions_break_at_dots_only():
    page = write_certificate_page(fakes.kept())
    codes = re.findall(r'<code class="opcode">(.*?)</code>', page)
    assert codes
    assert all(code.count("<wbr>") == code.count(".") for code in codes)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_other_reasons_are_counted(others):
    found = fakes.atomics()
    first = found.targets[0]
    changed = [
        replace(one, reason=f"reason {min(at, others)}") for at, one in enumerate(first.outcomes)
    ]
    assert all(one.verdict != EXECUTED for one in changed)
    sentence = conclude(replace(found, targets=(replace(first, outcomes=tuple(changed)),)))
    words = {0: "reason 0.", 1: "(and 1 other reason).", 2: "(and 2 other reasons)."}
    assert words[others] in sentence
