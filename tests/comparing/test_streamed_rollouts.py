"""Theorem: a comparison of rollouts needs memory of a fixed size, and its result does not depend on files or order."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import isobit
from isobit.comparing.rollouts import comparing
from isobit.comparing.rollouts.comparing import compare_parts, compare_sides
from isobit.comparing.rollouts.reading import FileSide, files_of
from tests.peak_memory import peak_of


def records(count, length=40, spoil=0.0, seed=0, **more):
    make = np.random.default_rng(seed)
    for at in range(count):
        values = (-make.random(length)).astype(np.float32)
        values = values + np.float32(spoil) * values.astype(np.float32) ** 2
        ids = make.integers(0, 50_000, length).tolist()
        yield {"id": at, "token_ids": ids, "logprobs": values.astype(float).tolist(), **more}


def write(path, lines):
    with path.open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
    return path


def cut(folder, lines, parts):
    folder.mkdir()
    lines = list(lines)
    for k in range(parts):
        start, stop = len(lines) * k // parts, len(lines) * (k + 1) // parts
        write(folder / f"{k:03}.jsonl", lines[start:stop])
    return folder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(comparing, "BATCH", 100)


def judged(report):
    """What must be equal: everything, floats by their bits."""
    return replace(report, metrics={n: float(v).hex() for n, v in report.metrics.items()})


def test_files_batches_and_order_change_nothing(tmp_path, small):
    mine, theirs = list(records(60)), list(records(60, spoil=1e-3))
    whole = isobit.rollout.compare(
        write(tmp_path / "a.jsonl", mine), write(tmp_path / "b.jsonl", theirs)
    )
    assert whole.cause == "undetermined"
    assert (whole.sequences, whole.tokens, whole.exit_code) == (60, 2400, 1)
    for parts in (2, 7):
        a, b = (cut(tmp_path / f"{n}{parts}", x, parts) for n, x in (("a", mine), ("b", theirs)))
        assert judged(isobit.rollout.compare(a, b)) == judged(whole)
        sides = [files_of(a), files_of(b)]
        found = [compare_sides(*(FileSide((s[k],), k, True) for s in sides)) for k in range(parts)]
        assert judged(compare_parts(found)) == judged(whole)
    shuffled = random.Random(0).sample(theirs, 60)
    arrived = isobit.rollout.compare(tmp_path / "a.jsonl", write(tmp_path / "c.jsonl", shuffled))
    assert judged(arrived).metrics == judged(whole).metrics
    assert (arrived.tokens, arrived.tokens_differ) == (whole.tokens, whole.tokens_differ)
    uneven = [cut(tmp_path / f"u{i}", x, 3) for i, x in enumerate((mine, shuffled))]
    found = [
        compare_sides(*(FileSide((files_of(s)[k],), k, True) for s in uneven)) for k in range(3)
    ]
    assert judged(compare_parts(found)).metrics == judged(whole).metrics  # partners in other files


def test_findings_are_merged_over_batches(tmp_path, small):
    mine, theirs = list(records(60, temperature=1.0)), list(records(60, temperature=1.0))
    theirs[3]["temperature"], theirs[50]["temperature"] = 0.5, 0.5
    theirs[40]["token_ids"][5] += 1
    a, b = write(tmp_path / "a.jsonl", mine), write(tmp_path / "b.jsonl", theirs)
    found = {one.kind: one for one in isobit.rollout.compare(a, b).findings}
    assert (found["temperature"].differ, found["temperature"].of) == (2, 60)
    assert found["temperature"].detail == "temperature differs in 2 of 60 sequences"
    assert "sequence '3'" in found["temperature"].first
    assert (found["ids"].differ, found["ids"].of) == (1, 60)


def test_ids_twice_are_counted_beyond_memory(tmp_path, monkeypatch, small):
    monkeypatch.setattr(comparing.IdDigests, "KEPT", 16)
    lines = list(records(60)) + list(records(5))
    a = write(tmp_path / "a.jsonl", lines)
    (one,) = isobit.rollout.compare(a, a).findings
    assert (one.kind, one.differ) == ("sequences", 10)
    b = write(tmp_path / "b.jsonl", records(60))
    assert isobit.rollout.compare(b, b).equal


def test_orders_that_differ_too_much_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "WAITING", 400)
    a = write(tmp_path / "a.jsonl", records(60))
    b = write(tmp_path / "b.jsonl", reversed(list(records(60))))
    with pytest.raises(isobit.ArgumentError, match="one order of their ids"):
        isobit.rollout.compare(a, b)


def test_parquet_is_read_as_jsonl_is(tmp_path, small):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, spoil in (("a", 0.0), ("b", 1e-3)):
        lines = list(records(70, spoil=spoil, temperature=1.0, mask=[1] * 39 + [0]))
        write(tmp_path / f"{name}.jsonl", lines)
        parquet.write_table(arrow.Table.from_pylist(lines), tmp_path / f"{name}.parquet")
    sides = [[tmp_path / f"{n}.{e}" for n in "ab"] for e in ("jsonl", "parquet")]
    found = [judged(isobit.rollout.compare(*pair)) for pair in sides]
    assert found[0] == found[1]
    assert found[0].tokens == 70 * 39
    wrong = tmp_path / "wrong.parquet"
    wrong.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(isobit.ArgumentError, match=r"wrong\.parquet"):
        isobit.rollout.compare(wrong, sides[1][0])
    table = arrow.table({"token_ids": [[1, -2]], "logprobs": [[-1.0, -2.0]]})
    parquet.write_table(table, wrong)
    with pytest.raises(isobit.ArgumentError, match="row 0"):
        isobit.rollout.compare(wrong, wrong)


def test_memory_does_not_grow_with_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "BATCH", 1 << 12)
    monkeypatch.setattr(comparing, "SAMPLE", 1 << 13)
    peaks = []
    for count in (100, 200, 1600):  # the first loads what is loaded once
        a = write(tmp_path / "a.jsonl", records(count, 128))
        b = write(tmp_path / "b.jsonl", records(count, 128, spoil=1e-3))
        found, peak = peak_of(lambda a=a, b=b: isobit.rollout.compare(a, b))
        assert found.tokens == count * 128
        peaks.append(peak)
    slope = (peaks[2] - peaks[1]) / (1400 * 128)
    assert slope < 20, peaks  # bytes per token; all sequences in memory are more than 200


def test_torch_is_the_same_as_before():
    """The metrics equal their formulas in fp64, to the rounding of torch's sums."""
    make = torch.Generator().manual_seed(0)
    mine = [-torch.rand(n, generator=make) for n in (5, 0, 33)]
    theirs = [x + 1e-2 * torch.randn(len(x), generator=make) for x in mine]
    found = isobit.rollout.mismatch_metrics(mine, theirs)
    ratio = (torch.cat(theirs).double() - torch.cat(mine).double()).numpy()
    wanted = {
        "vllm_vs_local_logprob_diff_std": np.abs(ratio).std(ddof=1),
        "rollout_corr/kl": -ratio.mean(),
        "rollout_corr/k3_kl": (np.exp(ratio) - ratio - 1).mean(),
    }
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-15)
