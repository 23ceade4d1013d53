"""The mismatch of rollout and trainer under the names that RL frameworks log.

Each is computed as its framework computes it, over the tokens that count: slime takes the mean of each sequence first,
the others take the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor


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
