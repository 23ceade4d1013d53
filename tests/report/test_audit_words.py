"""The conclusion is what the record shows, in every case; the text for terminals has it, and no control characters."""

from dataclasses import replace

import pytest

from isobit.auditing.records import Accuracy, Place, Skipped, Unjudged
from isobit.auditing.report.sentence import conclude, conclude_axis, magnitude, percent, ratio, tone
from isobit.auditing.report.text import describe_audit
from tests.report import fake_audits as fakes

UNJUDGED = (Unjudged(Place("aten::sort"), "batch", "rows are sorted by expert"),)
NO_EFFECT = fakes.effect_of(0, largest=0.0)


def guilty(*shares, **others):
    places = [fakes.place_of(at, 6, at) for at in range(len(shares))]
    found = [fakes.guilty_of(p, share=s) for p, s in zip(places, shares, strict=True)]
    return replace(fakes.batch_axis(), guilty=tuple(found), judged=29, unjudged=(), **others)


SENTENCES = {
    "2 of 29 judged operators depend on the batch; one of them, aten::mm in model.layers.0.mlp.up_proj, makes 98 % of "
    "the effect (5 of 23 log-probabilities differ, by at most 3.0e-3); nothing else does: with all of them "
    "substituted, “batch of 8” equals “alone” bit for bit.": guilty(0.98, 0.02),
    "1 of 29 judged operators depends on the batch; it makes 100 % of the effect (5 of 23 log-probabilities differ, by "
    "at most 3.0e-3); nothing else does: with it substituted, “batch of 8” equals “alone” bit for bit.": guilty(1.0),
    "5 of 29 judged operators depend on the batch; 4 of them make 95 % of the effect of those found (5 of 23 "
    "log-probabilities differ, by at most 3.0e-3); the list is not complete: with all of them substituted, 2 of 23 "
    "log-probabilities still differ (two rows are mixed).": guilty(
        0.4, 0.3, 0.2 - 1e-9, 0.05, 0.05 + 1e-9, complete=False, remaining=fakes.effect_of(2),
        why_not="two rows are mixed",
    ),
    "2 of 29 judged operators depend on the batch; they change none of 23 log-probabilities for this input; the list "
    "is complete: with all of them substituted, “batch of 8” equals “alone” bit for bit.": guilty(
        0.0, 0.0, effect=NO_EFFECT
    ),
    "1 of 29 judged operators depends on the batch; 5 of 23 log-probabilities differ, by at most 3.0e-3, and none of "
    "it is made by it; the list is not complete: with it substituted, 5 of 23 log-probabilities still differ, and 1 "
    "operator has no verdict.": replace(
        guilty(0.0, remaining=fakes.effect_of(), complete=False, why_not="a reason"), unjudged=UNJUDGED
    ),
    "1 of 29 judged operators depends on the batch; what this does to the results was not measured; the list was not "
    "shown to be complete.": guilty(None, effect=None, remaining=None, complete=False),
    "2 of 29 judged operators depend on the batch; 5 of 23 log-probabilities differ, by at most 3.0e-3; shares of "
    "single operators were not measured; the list was not shown to be complete (no time).": guilty(
        None, None, complete=False, why_not="no time"
    ),
    "None of 227 judged operators depends on the padding: left padding and no padding agree bit for bit.": (
        fakes.clean_axis()
    ),
    "None of 227 judged operators depends on the batch, yet 5 of 23 log-probabilities differ, by at most 3.0e-3: the "
    "cause is among the 1 operator without a verdict.": fakes.clean_axis(
        "batch", effect=fakes.effect_of(), unjudged=UNJUDGED, complete=False
    ),
    "None of 227 judged operators changes from run to run, yet 5 of 23 log-probabilities differ, by at most 3.0e-3: "
    "the cause was not found.": fakes.clean_axis("repeat", effect=fakes.effect_of(), complete=False),
    "None of 227 judged operators depends on the batch, but the list was not shown to be complete: 1 operator has no "
    "verdict.": fakes.clean_axis("batch", unjudged=UNJUDGED, complete=False),
    "Nothing was judged on the axis batch (1 operator has no verdict), so nothing follows.": fakes.clean_axis(
        "batch", judged=0, unjudged=UNJUDGED, complete=False
    ),
    "Nothing was judged on the axis batch (no operator was compared), so nothing follows, although 5 of 23 "
    "log-probabilities differ, by at most 3.0e-3.": fakes.clean_axis(
        "batch", judged=0, complete=False, effect=fakes.effect_of()
    ),
}  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences(sentence):
    assert conclude_axis(SENTENCES[sentence]) == sentence


def test_an_error_is_called_a_bug():
    words = conclude_axis(fakes.error_axis())
    assert words.startswith(
        "This is a bug, not rounding: in “batch of 8” the error of custom::grouped_mm_backward in experts.3, backward "
        "is 912 times what rounding can explain; 1 of 30 judged operators depends on the batch"
    )
    axis = fakes.error_axis()
    other = replace(axis.guilty[0], accuracy=Accuracy("fp64", 0.2, 40.0))
    assert "in “alone” the error" in conclude_axis(replace(axis, guilty=(other,)))
    orders = fakes.batch_axis()
    assert "bug" not in conclude_axis(orders)


def test_an_error_comes_before_a_larger_effect():
    larger = replace(fakes.batch_axis(), axis="padding", effect=fakes.effect_of(23, largest=9.0))
    assert conclude(fakes.audit_of(larger, fakes.error_axis())).startswith("This is a bug")


def test_random_operators_are_called_so():
    assert "changes from run to run (it draws random numbers" in conclude_axis(fakes.random_axis())


def test_the_whole_names_every_axis():
    words = conclude(fakes.rich())
    assert words.startswith("18 of 268 judged operators depend on the batch; one of them")
    assert "Also, 2 of 227 judged operators depend on whether tokens are decoded" in words
    assert "No operator is guilty on the axes padding and repeat." in words
    assert "Not audited: the axis threads." in words
    open_ = fakes.clean_axis("decode", judged=0, complete=False)
    assert "Without a conclusion: the axis decode." in conclude(
        fakes.audit_of(fakes.batch_axis(), open_)
    )


def test_a_clean_audit_and_one_that_shows_nothing_read_differently():
    clean = fakes.audit_of(fakes.clean_axis(), fakes.clean_axis("repeat"))
    assert conclude(clean) == (
        "No operator is guilty on the axes padding (227 judged) and repeat (227 judged): on each, both runs agree bit "
        "for bit."
    )
    assert tone(clean) == "good"
    empty = fakes.audit_of(skipped=(Skipped("tp", "one rank"),))
    assert conclude(empty) == ("Nothing was audited: tp could not be varied, so nothing follows.")
    assert tone(empty) == "mute"
    skipped = replace(clean, skipped=(Skipped("tp", "one rank"),))
    assert tone(skipped) == "mute"
    assert "Not audited: the axis tp." in conclude(skipped)
    assert tone(fakes.rich()) == "bad"


def test_a_record_that_contradicts_itself_does_not_read_as_clean():
    axis = fakes.clean_axis(effect=fakes.effect_of())  # complete, none guilty, and yet it differs
    assert "yet 5 of 23" in conclude(fakes.audit_of(axis, fakes.clean_axis("repeat")))


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (None, "–"), (0.0, "0 %"), (1.0, "100 %"), (0.9999, ">99.9 %"), (0.9951, "99.5 %"), (0.0001, "<0.1 %"),
        (0.984, "98 %"), (1.0004, "≈100 %"), (1.006, "100.6 %"), (-1e-9, ">-0.1 %"),
        (0.015, "1.5 %"), (-0.25, "-25 %"), (1.25, "125 %"), (float("nan"), "NaN"),
    ],
)  # fmt: skip
def test_only_exact_shares_read_as_none_or_all(share, words):
    assert percent(share) == words


def test_sizes():
    found = [magnitude(x) for x in (0.0, 3e-3, 0.7, -12.34, 1e300, float("inf"), None)]
    assert found == ["0", "3.0e-3", "0.7", "-12", "1.0e300", "∞", "–"]
    assert [ratio(x) for x in (1.02, 912.4, 0.31, 1e9, None)] == [
        "1.02",
        "912",
        "0.31",
        "1.0e9",
        "–",
    ]


def test_text_has_every_part():
    text = describe_audit(fakes.rich())
    for words in (
        "18 of 268 judged",
        "threads: not audited, this machine has one processor",
        "Guilty on the axis batch: sample 0 of 8 runs alone",
        "batch: 8 × rows are sorted by expert (aten::index_add_)",
        "Complete: no. decode: the cache of layer 0 is not followed",
    ):
        assert words in text
    assert "and 380 more" in describe_audit(fakes.many())
    assert "Complete: yes." in describe_audit(fakes.audit_of(fakes.batch_axis()))
    assert "Complete: no, nothing was audited." in describe_audit(fakes.audit_of())


def test_text_cannot_control_a_terminal_or_forge_a_line():
    name = "\x1b[2Jx\nComplete: yes.\r\x9b31m"
    place = Place("aten::mm", name, name, 1)
    axis = replace(fakes.batch_axis(), guilty=(fakes.guilty_of(place, share=1.0),), why_not=name)
    text = describe_audit(fakes.audit_of(replace(axis, complete=False), model=name))
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert not [line for line in text.splitlines() if line.startswith("Complete: yes")]
