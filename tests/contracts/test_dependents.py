"""A change of one operator's code judges the contracts that rest on it, and no others."""

import shutil
from pathlib import Path

import pytest

import isobit
from isobit.contracts.store import sources, tree

SOURCE = Path(isobit.__file__).parent
# These rest on every operator of a model.
WHOLE = {"audit-v1", "chain-v1", "distributed-training-v1"}


def digests(root, home):
    for cached in (sources.find_file, sources.executor_digest):
        cached.cache_clear()
    found = tree.Tree([root], home)
    return {id: found.digest(id) for id in found.entries}


# their subjects are one file
ROWS = {
    "rms-norm",
    "layer-norm",
    "attention",
    "gqa",
    "rope",
    "embedding",
    "cross-entropy",
    "logprob",
}
ANY = {f"any-{name}-v1" for name in ROWS}


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        # the proofs of both norms are one file
        (
            "ops/rms_norm/op.py",
            {"rmsnorm-kernel-v1", "layernorm-kernel-v1", "gradient-accumulation-v1", *ANY, *WHOLE},
        ),
        ("ops/rotary/portable.py", {"rope-kernel-v1", *ANY, *WHOLE}),
        # audit-v1 audits its models without isobit's cache
        ("ops/attention/cache.py", {"kv-cache-kernel-v1", *WHOLE} - {"audit-v1"}),
    ],
)
def test_a_change_touches_its_dependents(changed, touched, tmp_path, monkeypatch):
    root = tmp_path / "isobit"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(sources, "ROOT", root)
    monkeypatch.setattr(tree, "ROOT", root)
    before = digests(root, tmp_path)
    assert len(before) == len(digests(root, tmp_path)) > 20
    path = root / changed
    path.write_text(path.read_text() + "\n# changed\n")
    after = digests(root, tmp_path)
    assert {id for id in before if before[id] != after[id]} == touched
    sources.find_file.cache_clear()
    sources.executor_digest.cache_clear()
