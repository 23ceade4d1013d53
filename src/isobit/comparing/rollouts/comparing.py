"""`compare`: which of semantics, weights and numerics makes a rollout's log-probabilities differ from a trainer's."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from isobit.bits import as_integers
from isobit.comparing.checkpoints.weight_digests import compare_weights
from isobit.comparing.rollouts.reading import Scored, read
from isobit.comparing.rollouts.report import Finding, RolloutReport
from isobit.comparing.rollouts.semantics import (
    Aligned,
    Pairs,
    compare_declared,
    infer,
    pair_sequences,
)

# The mismatch of rollout and trainer under the names that RL frameworks log.
#
# Each is computed as its framework computes it, over the tokens that count: slime takes the mean of
# each sequence first, the others take the mean over tokens.


def mismatch_metrics(rollout: Many[Tensor], trainer: Many[Tensor]) -> dict[str, float]:
    """Return the metrics of log-probabilities, one pair of tensors per sequence.

    Args:
        rollout: Log-probabilities of the tokens that count, a tensor per sequence.
        trainer: The same by the trainer.

    Returns:
        Values by the names of slime, verl, prime-rl, NeMo-RL, TRL, TitanRL and open-instruct. Empty if there is no
        token.

    Example:
        >>> found = isobit.rollout.mismatch_metrics([torch.tensor([-1.0])], [torch.tensor([-1.5])])
        >>> found["train_rollout_logprob_abs_diff"], found["sampling/sampling_logp_difference/max"]
        (0.5, 0.5)
    """
    pairs = [(r.double(), t.double()) for r, t in zip(rollout, trainer, strict=True) if len(r)]
    if not pairs:
        return {}
    mine, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    ratio = theirs - mine  # log p of the trainer over that of the rollout
    apart = ratio.abs()
    probs = (theirs.exp() - mine.exp()).abs()
    k3 = float((ratio.exp() - ratio - 1).mean())
    spread = [float(x.std()) if len(x) > 1 else 0.0 for x in (probs, apart)]
    per_sequence = [float((t - r).abs().mean()) for r, t in pairs]
    mean, most = float(apart.mean()), float(apart.max())
    return {
        "train_rollout_logprob_abs_diff": sum(per_sequence) / len(per_sequence),
        "training/rollout_probs_diff_max": float(probs.max()),
        "training/rollout_probs_diff_mean": float(probs.mean()),
        "training/rollout_probs_diff_std": spread[0],
        "rollout_corr/kl": float(-ratio.mean()),
        "rollout_corr/k3_kl": k3,
        "mismatch_kl": k3,
        "gen_kl_error": k3,
        "token_mult_prob_error": float(apart.exp().mean()),
        "sampling/sampling_logp_difference/mean": mean,
        "sampling/sampling_logp_difference/max": most,
        "sampling/importance_sampling_ratio/min": float(ratio.exp().min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.exp().mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.exp().max()),
        "logprob_diff/max": most,
        "vllm_vs_local_logprob_diff_mean": mean,
        "vllm_vs_local_logprob_diff_max": most,
        "vllm_vs_local_logprob_diff_std": spread[1],
        "clip_share_0.2": float(((ratio.exp() - 1).abs() > 0.2).double().mean()),
    }


def compare(rollout: Any, trainer: Any) -> RolloutReport:
    """Compare a rollout with a trainer, and say which of semantics, weights and numerics differs.

    Semantics come first, since values of different questions cannot be compared: sequences, token ids, shift, mask,
    positions, temperature, truncation, normaliser; those that are declared, then those that values reveal. Then weights
    by digests. What remains is numerics. Bits are compared, with no tolerance.

    Args:
        rollout: What the engine computed: a `Scored`, vLLM's list of RequestOutput, a mapping of arrays, or the path of
            a JSONL file; see `isobit.rollout.read`.
        trainer: What the trainer computed for the same tokens, likewise.

    Returns:
        The report: findings with their class, and metrics under the names that RL frameworks log.

    Raises:
        ArgumentError: If a side cannot be read.

    Example:
        >>> ids, logprobs = [[5, 6, 7]], torch.tensor([[-1.0, -2.0, -0.5]])
        >>> rollout = {"prompt_token_ids": [[1, 2]], "token_ids": ids, "logprobs": logprobs}
        >>> isobit.rollout.compare(rollout, rollout).equal
        True
        >>> other = rollout | {"token_ids": [[5, 6, 8]]}
        >>> found = isobit.rollout.compare(rollout, other)
        >>> found.cause, found.findings[0].kind
        ('semantics', 'ids')
    """
    mine, theirs = read(rollout), read(trainer)
    pairs, findings = pair_sequences(mine, theirs)
    findings += compare_declared(pairs)
    aligned = align(pairs)
    tokens, tokens_differ, first = count_tokens(aligned)
    row_values, row_values_differ, row_words = count_rows(aligned)
    weights, tensors, notes = weight_findings(mine, theirs)
    findings += not_finite(aligned)
    differs = tokens_differ > 0 or row_values_differ > 0
    if differs and not findings:
        reason = infer(aligned)
        findings += [] if reason is None else [reason]
    if differs and not findings and not weights:
        findings.append(numerics(aligned, tensors, (tokens, tokens_differ, first), row_words))
    elif differs:
        notes.append("numerics were not judged: what comes before them differs")
    return RolloutReport(
        (*findings, *weights),
        mismatch_metrics(*selected_by_sequence(aligned)),
        len(pairs),
        tokens,
        tokens_differ,
        row_values,
        row_values_differ,
        tensors,
        tuple(notes + undeclared(pairs)),
    )


def align(pairs: Pairs) -> Aligned:
    """Return the pairs whose values can be compared, with the tokens that count on both sides."""
    return [
        (a, b, a.counts & b.counts)
        for a, b in pairs
        if a.tokens == b.tokens and a.logprobs is not None and b.logprobs is not None
    ]


def selected_by_sequence(aligned: Aligned) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the log-probabilities that count, a tensor per sequence, of both sides."""
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for *pair, counts in aligned:
        for into, one in zip(sides, pair, strict=True):
            assert one.logprobs is not None
            into.append(one.logprobs[counts])
    return sides


def count_tokens(aligned: Aligned) -> tuple[int, int, str]:
    """Return how many log-probabilities count, how many differ in a bit, and the first."""
    total, wrong, first = 0, 0, ""
    for a, b, counts in aligned:
        assert a.logprobs is not None
        assert b.logprobs is not None
        apart = (as_integers(a.logprobs) != as_integers(b.logprobs)) & counts
        total, wrong = total + int(counts.sum()), wrong + int(apart.sum())
        if not first and bool(apart.any()):
            at = int(apart.nonzero()[0])
            values = f"{float(a.logprobs[at]):.9g} and {float(b.logprobs[at]):.9g}"
            first = f"sequence {a.id!r}, token {at} (id {a.tokens[at]}): {values}"
    return total, wrong, first


def count_rows(aligned: Aligned) -> tuple[int, int, str]:
    """Return how many values of full rows both sides have, how many differ in a bit, and what that means."""
    total = wrong = flips = rows = 0
    largest = 0.0
    for a, b, counts in aligned:
        if a.rows is None or b.rows is None or a.rows.shape != b.rows.shape:
            continue
        x, y = a.rows[counts], b.rows[counts]
        total, rows = total + x.numel(), rows + len(x)
        wrong += int((as_integers(x) != as_integers(y)).sum())
        apart = (x.double() - y.double()).abs()
        largest = max(
            largest, float(apart[apart.isfinite()].max()) if apart.isfinite().any() else 0.0
        )
        flips += int((x.argmax(-1) != y.argmax(-1)).sum()) if x.numel() else 0
    words = f"full rows: at most {largest:.3g}, {flips} of {rows} have another largest token"
    return total, wrong, words if total else ""


def not_finite(aligned: Aligned) -> list[Finding]:
    """Return a finding if a token that counts has NaN or an infinity: equal bits would hide it."""
    total = wrong = 0
    first = ""
    for *pair, counts in aligned:
        for side, one in zip(("rollout", "trainer"), pair, strict=True):
            assert one.logprobs is not None
            bad = ~one.logprobs.isfinite() & counts
            total, wrong = total + int(counts.sum()), wrong + int(bad.sum())
            if not first and bool(bad.any()):
                at = int(bad.nonzero()[0])
                first = f"{side}, sequence {one.id!r}, token {at}: {float(one.logprobs[at])}"
    if not wrong:
        return []
    detail = "log-probabilities of tokens that were drawn are not finite"
    return [Finding("numerics", "not finite", detail, wrong, total, first)]


def weight_findings(rollout: Scored, trainer: Scored) -> tuple[list[Finding], int, list[str]]:
    """Return the tensors that differ, how many were compared, and a note if none could be."""
    if rollout.weights is None or trainer.weights is None:
        return [], 0, ["weights were not compared: a side has no digests"]
    previous = trainer.previous if trainer.previous is not None else rollout.previous
    found = compare_weights(rollout.weights, trainer.weights, previous=previous)
    return (
        [
            Finding("weights", one.kind, f"{one.name}: {one.detail}", one.rows, one.of, one.name)
            for one in found.differences
        ],
        found.tensors,
        [],
    )


def numerics(
    aligned: Aligned, tensors: int, counted: tuple[int, int, str], row_words: str
) -> Finding:
    """Return what remains: other arithmetic, or, where weights were not compared, one of the two."""
    tokens, wrong, first = counted
    mine, theirs = (torch.cat(side).double() for side in selected_by_sequence(aligned))
    apart = (mine - theirs).abs()
    size = f"log-probabilities differ by up to {float(apart.max()):.3g}, {float(apart.mean()):.3g} in the mean"
    detail = "; ".join(filter(None, (size, row_words, starts(aligned))))
    if tensors:
        return Finding("numerics", "numerics", detail, wrong, tokens, first)
    return Finding("undetermined", "weights or numerics", detail, wrong, tokens, first)


def starts(aligned: Aligned) -> str:
    """Return at which tokens of their completions sequences begin to differ."""
    at = []
    for a, b, counts in aligned:
        assert a.logprobs is not None
        assert b.logprobs is not None
        apart = (as_integers(a.logprobs) != as_integers(b.logprobs)) & counts
        if bool(apart.any()):
            at.append(int(apart.nonzero()[0]))
    if not at:
        return ""
    return f"{len(at)} of {len(aligned)} sequences differ, first at token {min(at)}"


def undeclared(pairs: Pairs) -> list[str]:
    """Return notes on what a side left open."""
    notes = []
    for name in ("temperature", "top_k", "top_p"):
        sides = [all(getattr(p[i].policy, name) is None for p in pairs) for i in (0, 1)]
        if pairs and sides[0] != sides[1]:
            notes.append(f"only the {'trainer' if sides[0] else 'rollout'} declares {name}")
    widths = {
        (a.rows.shape[-1], b.rows.shape[-1])
        for a, b in pairs
        if a.rows is not None and b.rows is not None
    }
    notes += [f"full rows of {x} and {y} tokens were not compared" for x, y in widths if x != y]
    if pairs and not widths:
        notes.append("full rows were not compared: equal tokens do not show equal distributions")
    return notes
