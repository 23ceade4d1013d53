"""A change of one operator's code judges the contracts that rest on it, and no others."""

import shutil
from pathlib import Path

import pytest

import isobit
from isobit.contracts.store import sources, tree

SOURCE = Path(isobit.__file__).parent
# These rest on every operator of a model.
WHOLE = {"audit-v1", "chain-v1", "distributed-training-v1"}


def forget_files():
    for cached in (sources.find_file, sources.executor_digest):
        cached.cache_clear()


def digests(root):
    forget_files()
    found = tree.Tree([root], root.parent)
    return {id: found.digest(id) for id in found.entries}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package, which `tree` and `sources` take for the package itself, and its digests."""
    root = tmp_path_factory.mktemp("copy") / "isobit"
    shutil.copytree(SOURCE, root, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (sources, tree):
            patch.setattr(module, "ROOT", root)
        before = digests(root)
        assert len(before) > 20
        yield root, before
    forget_files()


# their wrong kernels are one file
ROWS = {
    "linear",
    "softmax",
    "log-softmax",
    "silu",
    "gelu",
    "swiglu",
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
        # of post-training, only distillation rests on softmax
        (
            "ops/softmax/op.py",
            {
                f"{name}-kernel-v1"
                for name in (
                    "attention",
                    "cross-entropy",
                    "gqa",
                    "knowledge-distillation",
                    "kv-cache",
                    "lm-head",
                    "log-softmax",
                    "logprob",
                    "softmax",
                )
            }
            | {"distill-loss-v1", "mixture-of-experts-v1", *ANY, *WHOLE},
        ),
        ("ops/distillation/portable.py", {"knowledge-distillation-kernel-v1", "distill-loss-v1"}),
        ("library/post_training/pruning.py", {"pruning-kernel-v1", "post-training-v1"}),
        ("library/post_training/tokenizing.py", {"bpe-tokenizer-kernel-v1", "data-pipeline-v1"}),
        # audit-v1 audits its models without isobit's cache
        ("ops/attention/cache.py", {"kv-cache-kernel-v1", *WHOLE} - {"audit-v1"}),
    ],
)
@pytest.mark.sweep(3)
def test_a_change_touches_its_dependents(changed, touched, copy):
    root, before = copy
    path = root / changed
    text = path.read_text()
    path.write_text(text + "\n# changed\n")
    try:
        after = digests(root)
    finally:
        path.write_text(text)
    assert {id for id in before if before[id] != after[id]} == touched


def test_a_change_that_is_taken_back_touches_nothing(copy):
    assert digests(copy[0]) == copy[1]
