"""Samplers that are wrong in one way each; the tests must tell every one of them from isobit.sampling.sample."""

import torch

from isobit.sampling import Drawn, drawing, sample, support


def generator_shared_by_the_batch(logits, *, seed, requests, positions, **options):
    """One torch generator draws for all rows."""
    drawn = sample(logits, seed=seed, requests=requests, positions=positions, **options)
    scaled = torch.where(drawn.kept, logits, -torch.inf)
    generator = torch.Generator().manual_seed(int(seed))
    tokens = torch.multinomial(scaled.softmax(-1), 1, generator=generator).squeeze(1)
    return Drawn(tokens, drawn.logprobs, drawn.kept)


def keyed_by_row(logits, *, seed, requests, positions, **options):
    """The key has the row of the batch instead of the request."""
    return sample(
        logits, seed=seed, requests=list(range(len(logits))), positions=positions, **options
    )


def without_position(logits, *, seed, requests, positions, **options):
    """The key has no position: every token of a request has one number."""
    return sample(logits, seed=seed, requests=requests, positions=0, **options)


def without_seed(logits, *, seed, requests, positions, **options):
    """The key has no seed."""
    return sample(logits, seed=0, requests=requests, positions=positions, **options)


def highest_id_of_ties(logits, **options):
    """Equal logits are ranked by the highest id."""
    drawn = sample(logits.flip(-1), **options)
    return Drawn(logits.shape[-1] - 1 - drawn.tokens, drawn.logprobs, drawn.kept.flip(-1))


def all_of_the_edge(logits, **options):
    """top-k keeps every token as likely as the k-th."""
    drawn = sample(logits, **options)
    least = torch.where(drawn.kept, logits, torch.inf).amin(-1, keepdim=True)
    kept = logits >= least if options.get("top_k") else drawn.kept
    return Drawn(drawn.tokens, drawn.logprobs, kept)


def top_p_in_floats(logits, **options):
    """top-p adds rounded probabilities, and so depends on the order of addition."""
    drawn = sample(logits, **{**options, "top_p": None})
    values, order = logits.softmax(-1).half().sort(dim=-1, descending=True)
    first = values.cumsum(-1) - values < options.get("top_p", 1.0)
    kept = torch.zeros_like(drawn.kept).scatter(-1, order, first) & drawn.kept
    return Drawn(drawn.tokens, drawn.logprobs, kept)


def logprob_of_the_whole(logits, **options):
    """log p is normalised over the whole vocabulary."""
    drawn = sample(logits, **options)
    heat = torch.as_tensor(float(options.get("temperature", 1.0)) or 1.0)
    rows = drawing.log_softmax(drawing.divide_by_temperature(logits, heat.expand(len(logits))))
    return Drawn(drawn.tokens, rows.gather(1, drawn.tokens[:, None])[:, 0], drawn.kept)


def logprob_before_temperature(logits, **options):
    """log p is that of the logits before the temperature."""
    drawn = sample(logits, **options)
    rows = drawing.log_softmax(torch.where(drawn.kept, logits, -torch.inf))
    return Drawn(drawn.tokens, rows.gather(1, drawn.tokens[:, None])[:, 0], drawn.kept)


def top_p_before_temperature(logits, **options):
    """top-p is taken of the logits before the temperature."""
    drawn = sample(logits, **options)
    kept = support.keep_most_likely(logits, options.get("top_k"), options.get("top_p"))
    return Drawn(drawn.tokens, drawn.logprobs, kept)


WRONG = [
    generator_shared_by_the_batch,
    keyed_by_row,
    without_position,
    without_seed,
    highest_id_of_ties,
    all_of_the_edge,
    top_p_in_floats,
    logprob_of_the_whole,
    logprob_before_temperature,
    top_p_before_temperature,
]
