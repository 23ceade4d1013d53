"""The trainer scores the policy that sampled: generation with top-k and top-p, decoded with a cache in a batch.

The log-probabilities that `isobit.sampling.sample` returns while decoding are those of `isobit.logprobs(support=)`
over whole padded sequences, bit for bit, whether the kept ids travel or are kept again. Scored over the whole
vocabulary they differ by the log of the kept mass. Entropies do not depend on the batch.
"""

import pytest
import torch
from transformers import DynamicCache

import isobit
from isobit import bits
from isobit.gates.model.models import build_model
from isobit.sampling import Truncation, sample, support_ids

LENGTHS, NEW = (7, 4, 5), 6
POLICIES = [
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 9},
    {"top_k": 20, "top_p": 0.5},
    {"temperature": 0.6},
]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request):
    return isobit.enable(build_model("qwen3-tiny", request.param))


@torch.no_grad()
def roll_out(model, policy):
    """Decode a left-padded batch with a cache; return ids, mask, log p [B, NEW] and kept [B, NEW, V]."""
    generator = torch.Generator().manual_seed(1)
    width = max(LENGTHS)
    ids = torch.randint(1, 100, (len(LENGTHS), width), generator=generator)
    mask = torch.stack([torch.arange(width) >= width - n for n in LENGTHS]).long()
    cache, step, logprobs, kept = DynamicCache(), ids, [], []
    for at in range(NEW):
        logits = model(step, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
        positions = torch.tensor(LENGTHS) + at
        drawn = sample(logits[:, -1], seed=5, requests=[3, 1, 4], positions=positions, **policy)
        step = drawn.tokens[:, None]
        ids, mask = torch.cat([ids, step], 1), torch.cat([mask, torch.ones_like(step)], 1)
        logprobs.append(drawn.logprobs)
        kept.append(drawn.kept)
    return ids, mask, torch.stack(logprobs, 1), torch.stack(kept, 1)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_trainer_scores_the_policy_that_sampled(model, policy):
    ids, mask, rolled, kept = roll_out(model, policy)
    heat = policy.get("temperature", 1.0)
    made = slice(-NEW - 1, -1)
    prompt = torch.ones(len(ids), ids.shape[1] - NEW - 1, kept.shape[-1], dtype=torch.bool)
    last = torch.ones(len(ids), 1, kept.shape[-1], dtype=torch.bool)
    every = torch.cat([prompt, kept, last], 1)  # entry t: what the token after t was drawn from
    truncation = Truncation(policy.get("top_k"), policy.get("top_p"))
    with torch.no_grad():
        for support in (every, support_ids(every)):
            found = isobit.logprobs(model, ids, mask, temperature=heat, support=support)
            assert bits.equal(found[:, made], rolled)
        targets = torch.full_like(ids, -100)
        targets[:, made] = ids[:, -NEW:]
        asked = {"temperature": heat, "targets": targets}
        again = isobit.logprobs(model, ids, mask, support=truncation, **asked)
        assert bits.equal(again[:, made], rolled)
        for row in range(len(ids)):  # alone, without padding
            real, start = mask[row].bool(), ids.shape[1] - LENGTHS[row] - NEW
            alone = isobit.logprobs(
                model,
                ids[row, real][None],
                temperature=heat,
                targets=targets[row, real][None],
                support=every[row, start:][None],
            )
            assert bits.equal(alone[:, made], rolled[row : row + 1])
        whole = isobit.logprobs(model, ids, mask, temperature=heat)[:, made]
    if "top_k" in policy or "top_p" in policy:
        assert (rolled > whole).all()
        assert (rolled - whole).mean() > 0.1
    else:
        assert bits.equal(whole, rolled)


def test_gradients_flow_to_every_parameter(model):
    ids, mask, _, _ = roll_out(model, POLICIES[0])
    targets = torch.full_like(ids, -100)
    targets[:, -NEW - 1 : -1] = ids[:, -NEW:]
    found = isobit.logprobs(
        model, ids, mask, temperature=0.8, targets=targets, support=Truncation(top_p=0.7)
    )
    found.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert all(g is not None and g.isfinite().all() and g.any() for g in grads)


def test_entropies(model):
    ids, mask, _, _ = roll_out(model, POLICIES[0])
    with torch.no_grad():
        found, entropy = isobit.logprobs_and_entropy(model, ids, mask, temperature=0.8)
        assert bits.equal(found, isobit.logprobs(model, ids, mask, temperature=0.8))
        rows = (model(ids, attention_mask=mask).logits.double() / 0.8).log_softmax(-1)
        expected = -(rows.exp() * rows).sum(-1)
        scored = mask.bool() & (torch.arange(ids.shape[1]) < ids.shape[1] - 1)
        assert (entropy - expected)[scored].abs().max() < 2e-5
        assert not entropy[~scored].any()
        for row in range(len(ids)):
            real = mask[row].bool()
            alone = isobit.logprobs_and_entropy(model, ids[row, real][None], temperature=0.8)[1]
            assert bits.equal(alone[0], entropy[row, real])
        cut = isobit.logprobs_and_entropy(
            model,
            ids[:, -NEW:],
            temperature=0.8,
            support=Truncation(top_k=5),
            targets=ids[:, -NEW:] * 0 - 100,
        )[1]
        assert not cut.any()
        targets = model(ids[:, :5]).logits.argmax(-1)
        cut = isobit.logprobs_and_entropy(
            model, ids[:, :5], targets=targets, support=Truncation(top_k=5)
        )[1]
        assert (cut > 0).all()
        assert (cut < torch.tensor(5.0).log()).all()


def test_a_wrong_support_is_refused(model):
    ids = torch.arange(8)[None]
    with pytest.raises(isobit.ArgumentError, match="Truncation"):
        isobit.logprobs(model, ids, support=[1, 2])
