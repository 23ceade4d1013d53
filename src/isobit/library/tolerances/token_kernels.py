"""The least accurate kernels of operators with tokens that are still right: losses, attention, rotation, lookup.

See the note of derivations.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.library.any_kernel import token_operators
from isobit.library.any_kernel.attention_operators import repeated, turned
from isobit.library.any_kernel.token_operators import ids_of, targets_of
from isobit.library.stock import IGNORED
from isobit.library.tolerances.rounding import Rounded
from isobit.library.tolerances.row_kernels import (
    Errors,
    Given,
    log_softmax,
    log_softmax_gradients,
    normalised,
    shifted,
    transposed,
)

# ---- losses ---------------------------------------------------------------------------------------------


def at_targets(terms: Rounded, targets: Tensor) -> Rounded:
    """Return each row's term at its target; 0 without one."""
    return terms.each(lambda t: token_operators.at_targets(t, targets))


def chosen(g: Rounded, targets: Tensor, count: int) -> Rounded:
    """Return a gradient at each row's target."""

    def scattered(t: Tensor) -> Tensor:
        active = torch.where(targets == IGNORED, 0.0, t).unsqueeze(-1)
        return t.new_zeros(*t.shape, count).scatter(-1, targets.clamp(min=0).unsqueeze(-1), active)

    return g.each(scattered)


def cross_entropy(given: Given) -> Rounded:
    """Store what log_softmax does."""
    logits = given["logits"]
    targets = targets_of(logits.value, logits.value.shape[-1])
    return at_targets(log_softmax({"x": logits}), targets).weighted(-1.0)


def cross_entropy_gradients(given: Given, g: Rounded) -> Errors:
    """Store what the gradient of log_softmax does; Σg has one term."""
    logits = given["logits"]
    count = logits.value.shape[-1]
    at = chosen(g.weighted(-1.0), targets_of(logits.value, count), count)
    return {"logits": log_softmax_gradients({"x": logits}, at)["x"]}


def logprob(given: Given) -> Rounded:
    """Store the logits, and what log_softmax does."""
    logits = (given["hidden"] @ transposed(given["weight"])).stored()
    targets = targets_of(given["hidden"].value, len(given["weight"].value))
    return at_targets(log_softmax({"x": logits}), targets)


def logprob_gradients(given: Given, g: Rounded) -> Errors:
    """Store the logits, their gradient and the results."""
    logits = (given["hidden"] @ transposed(given["weight"])).stored()
    count = len(given["weight"].value)
    targets = targets_of(given["hidden"].value, count)
    active = g.each(lambda t: torch.where(targets == IGNORED, 0.0, t).unsqueeze(-1))
    of_logits = (chosen(g, targets, count) - normalised(shifted(logits)) * active).stored()
    return {
        "hidden": (of_logits @ given["weight"]).stored(),
        "weight": (transposed(of_logits) @ given["hidden"]).stored(),
    }


# ---- attention ------------------------------------------------------------------------------------------


def probabilities(given: Given) -> Rounded:
    """Store the scores and the probabilities."""
    q, k = given["q"], given["k"].each(lambda t: repeated(t, given["q"].value))
    scores = (q @ transposed(k)).scaled(q.value.shape[-1] ** -0.5).stored()
    hidden = torch.ones(scores.value.shape[-2:], dtype=torch.bool).triu(1)
    seen = Rounded(
        scores.value.masked_fill(hidden, -1e9),
        scores.wide.masked_fill(hidden, 0),
        scores.narrow.masked_fill(hidden, 0),
    )
    return normalised(shifted(seen)).each(lambda t: t.masked_fill(hidden, 0)).stored()


def attention(given: Given) -> Rounded:
    """Store the scores, the probabilities and the result."""
    v = given["v"].each(lambda t: repeated(t, given["q"].value))
    return (probabilities(given) @ v).stored()


def attention_gradients(given: Given, g: Rounded) -> Errors:
    """Store scores, probabilities, their gradients, each head's dk and dv, and the results."""
    q = given["q"]
    k, v = (given[name].each(lambda t: repeated(t, q.value)) for name in ("k", "v"))
    p = probabilities(given)
    of_p = (g @ transposed(v)).stored()
    of_scores = (p * (of_p - (p * of_p).sum(-1))).scaled(q.value.shape[-1] ** -0.5).stored()
    return {
        "q": (of_scores @ k).stored(),
        "k": over_a_group(transposed(of_scores), q, given["k"]),
        "v": over_a_group(transposed(p), g, given["k"]),
    }


def over_a_group(left: Rounded, right: Rounded, keys: Rounded) -> Rounded:
    """Add the products of the heads that share a key head: in one sum, or each stored and then added."""
    groups = (keys.value.shape[-3], -1)
    heads = (left @ right).stored().each(lambda t: torch.unflatten(t, -3, groups))
    if heads.value.shape[-3] == 1:
        return heads.each(lambda t: t.squeeze(-3))
    total = heads.sum(-3).each(lambda t: t.squeeze(-3)).stored()
    left = left.each(lambda t: torch.unflatten(t, -3, groups).transpose(-3, -2).flatten(-2))
    right = right.each(lambda t: torch.unflatten(t, -3, groups).flatten(-3, -2))
    wide = torch.maximum(total.wide, (left @ right).wide)
    return Rounded(total.value, wide, total.narrow)


# ---- rotation and lookup --------------------------------------------------------------------------------


def rotated(x: Rounded, given: Given, back: bool) -> Rounded:
    """Store both products and their sum."""
    cos, sin = (
        given[name].each(lambda t: torch.cat([t, t], -1).unsqueeze(-3)) for name in ("cos", "sin")
    )
    other = x.each(turned)
    signed = Rounded(-other.value if back else other.value, other.wide.abs(), other.narrow.abs())
    return ((x * cos).stored() + (signed * sin).stored()).stored()


def rope(given: Given) -> Rounded:
    """Turn forward."""
    return rotated(given["x"], given, back=False)


def rope_gradients(given: Given, g: Rounded) -> Errors:
    """Turn back."""
    return {"x": rotated(g, given, back=True)}


def embedding(given: Given) -> Rounded:
    """Copy rows."""
    ids = ids_of(given["places"].value, len(given["weight"].value))
    return given["weight"].each(lambda t: t[ids])


def embedding_gradients(given: Given, g: Rounded) -> Errors:
    """Add a row's tokens, then store it: a product with ones."""
    ids = ids_of(given["places"].value, len(given["weight"].value))
    ones = torch.nn.functional.one_hot(ids, len(given["weight"].value)).double()
    return {"weight": (Rounded.exact(ones.mT.contiguous()) @ g).stored()}
