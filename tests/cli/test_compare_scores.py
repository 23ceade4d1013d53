"""FALSIFY-ALBOR-005: a paired test finds planted improvements, and calls at most 5 % of equal models different."""

import json
import random

import pytest

from isobit import ArgumentError
from isobit.cli.main import main
from isobit.comparing.scores import compare_scores

TRIALS, ITEMS = 300, 120


def records(scores, **more):
    return [{"doc_id": i, "acc": s, "doc_hash": f"h{i}", **more} for i, s in enumerate(scores)]


def trial(seed: int, gain: float, binary: bool) -> str:
    """The verdict on two models that share how hard items are; the second is better by `gain`."""
    draw = random.Random(seed)
    hard = [draw.random() for _ in range(ITEMS)]
    sides = []
    for more in (0.0, gain):
        if binary:
            sides.append([float(draw.random() < min(1.0, h + more)) for h in hard])
        else:
            sides.append([h + more + draw.gauss(0, 0.2) for h in hard])
    return compare_scores(records(sides[0]), records(sides[1]), seed=seed).verdict


@pytest.mark.parametrize("binary", [True, pytest.param(False, marks=pytest.mark.full)])
def test_equal_models_are_called_different_in_at_most_five_percent(binary):
    found = [trial(seed, 0.0, binary) for seed in range(TRIALS)]
    wrong = TRIALS - found.count("no difference shown")
    # The level is a bound on the probability: three standard deviations of the count above it are chance.
    assert wrong <= 0.05 * TRIALS + 3 * (0.05 * 0.95 * TRIALS) ** 0.5
    if binary:
        assert wrong <= 0.05 * TRIALS  # the exact test of counts stays below its level


def test_improvements_are_found():
    found = [trial(seed, 0.25, True) for seed in range(100)]
    assert found.count("better") >= 90
    assert "worse" not in found
    assert [trial(seed, 0.2, False) for seed in range(3)] == ["better"] * 3


def test_order_does_not_matter():
    draw = random.Random(4)
    base, new = (records([draw.random() for _ in range(50)]) for _ in range(2))
    whole = compare_scores(base, new)
    assert compare_scores(base[::-1], draw.sample(new, 50)) == whole


def test_items_that_do_not_pair(tmp_path):
    base = records([1.0, 0.0, 1.0])
    assert "not in the second" in compare_scores(base, base[:2]).sentence
    other = [record | {"doc_hash": "x"} for record in base]
    assert "another doc_hash" in compare_scores(base, other).sentence
    assert compare_scores([], []).verdict == "could not compare"
    with pytest.raises(ArgumentError, match="twice"):
        compare_scores(base + base[:1], base)
    with pytest.raises(ArgumentError, match="--metric"):
        compare_scores(base, [record | {"acc": float("nan")} for record in base])


@pytest.mark.parametrize(("expect", "code"), [("better", 0), ("not-worse", 0), ("equal", 1)])
def test_the_command(tmp_path, capsys, expect, code):
    paths = []
    for name, solved in (("base", 2), ("new", 14)):
        path = tmp_path / f"{name}.jsonl"
        rows = records([float(i < solved) for i in range(20)])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    assert main(["compare", "scores", *paths, "--expect", expect]) == code
    assert "better: acc 0.1000 to 0.7000 over 20 items" in capsys.readouterr().out
    assert main(["compare", "scores", paths[0], str(tmp_path / "none.jsonl")]) == 2
