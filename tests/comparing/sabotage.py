"""A rollout and a trainer that agree, and ways to spoil one of them; each with the class and kind it must be given."""

import copy
from dataclasses import replace
from functools import cache

import torch
from transformers import DynamicCache

import isobit
from isobit.gates.model.models import build_model
from isobit.rollout import Policy, Scored, Sequence, digest_weights
from isobit.sampling import Truncation, sample, support_ids

PROMPTS = ((5, 17, 33, 2, 40, 8, 21), (9, 3, 77, 12), (61, 4, 4, 19, 30))
NEW = 10


@cache
def model_of(dtype=torch.bfloat16):
    return isobit.enable(build_model("qwen3-tiny", dtype))


def all_rows(logits, policy):
    """Log-probabilities of the policy over the whole vocabulary."""
    heat = policy.temperature or 1.0
    scaled = logits * (1.0 / torch.tensor(heat))
    if policy.normaliser == "kept":
        kept = Truncation(policy.top_k, policy.top_p).keep(scaled.reshape(-1, scaled.shape[-1]))
        scaled = torch.where(kept.reshape(scaled.shape), scaled, -torch.inf)
    return isobit.log_softmax(scaled)


@torch.no_grad()
def roll_out(policy, model=None):
    """Decode all prompts together, with a cache and left padding."""
    model = model or model_of()
    width = max(map(len, PROMPTS))
    ids = torch.tensor([(0,) * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    cache_, step, made = DynamicCache(), ids, []
    for at in range(NEW):
        logits = model(step, attention_mask=mask, past_key_values=cache_, logits_to_keep=1).logits
        where = torch.tensor([len(p) + at for p in PROMPTS])
        heat = {"temperature": 1.0 if policy.temperature is None else policy.temperature}
        drawn = sample(
            logits[:, -1],
            seed=3,
            requests=[0, 1, 2],
            positions=where,
            top_k=policy.top_k,
            top_p=policy.top_p,
            **heat,
        )
        step = drawn.tokens[:, None]
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        made.append((drawn, all_rows(logits[:, -1], policy)))
    sequences = []
    for at, prompt in enumerate(PROMPTS):
        tokens = tuple(int(drawn.tokens[at]) for drawn, _ in made)
        support = None
        if policy.normaliser == "kept":
            kept = [support_ids(drawn.kept[at]).tolist() for drawn, _ in made]
            support = tuple(map(tuple, kept))
        sequences.append(
            Sequence(
                str(at),
                prompt,
                tokens,
                torch.stack([drawn.logprobs[at] for drawn, _ in made]),
                positions=tuple(range(len(prompt), len(prompt) + NEW)),
                rows=torch.stack([rows[at] for _, rows in made]),
                support=support,
                policy=policy,
            )
        )
    return Scored(tuple(sequences), digest_weights(engine_names(model)), name="rollout")


@torch.no_grad()
def score(rollout, model=None, logits_of=None):
    """Score each sequence alone, as the trainer."""
    model = model or model_of()
    found = []
    for one in rollout.sequences:
        ids = torch.tensor([one.prompt + one.tokens])
        logits = (logits_of or (lambda m, i: m(i, use_cache=False).logits))(model, ids)
        rows = all_rows(logits[0, -NEW - 1 : -1].float(), one.policy)
        chosen = rows.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        found.append(replace(one, rows=rows, logprobs=chosen))
    return Scored(tuple(found), digest_weights(model), name="trainer")


def engine_names(model):
    """The model's weights as an engine has them: fused qkv and gate/up."""
    weights, found = model.state_dict(), {}
    for name, tensor in weights.items():
        if any(f".{x}_proj." in name for x in ("k", "v", "up")):
            continue
        for first, rest, word in (
            (".q_proj.", (".k_proj.", ".v_proj."), ".qkv_proj."),
            (".gate_proj.", (".up_proj.",), ".gate_up_proj."),
        ):
            if first in name:
                parts = [weights[name.replace(first, other)] for other in rest]
                name, tensor = name.replace(first, word), torch.cat([tensor, *parts])
        found[name] = tensor
    return found


def each(side, **changes):
    """Change parts of every sequence; a callable is given the sequence."""
    ones = (
        replace(s, **{k: v(s) if callable(v) else v for k, v in changes.items()})
        for s in side.sequences
    )
    return replace(side, sequences=tuple(ones))


def other_model(change, **options):
    """A copy of the model with another configuration or weights."""
    model = isobit.disable(copy.deepcopy(model_of()))
    change(model)
    return isobit.enable(model, **options)


# ---- semantics -------------------------------------------------------------------------------------------

HOT = Policy(temperature=0.7, top_k=0, top_p=1.0, normaliser="full")
CUT = Policy(temperature=1.0, top_k=0, top_p=0.8, normaliser="kept")
TOP = Policy(temperature=0.9, top_k=9, top_p=1.0, normaliser="kept")


def rescored(side, policy, declared=None):
    """The trainer's values under another policy, which it may not declare."""
    spoiled = score(each(side, policy=policy))
    return each(spoiled, policy=declared or policy, support=None)


def at_temperature_one(r, t):
    return r, rescored(t, replace(HOT, temperature=1.0), replace(HOT, temperature=None))


def temperature_declared(r, t):
    return r, rescored(t, replace(HOT, temperature=1.0))


def raw_logprobs(r, t):
    """The engine reports log-probabilities before the temperature, as vLLM's raw_logprobs."""
    raw = score(each(r, policy=replace(HOT, temperature=1.0)))
    return each(raw, policy=HOT), t


def temperature_twice(r, t):
    return r, rescored(t, replace(HOT, temperature=0.49), HOT)


def top_p_unscored(r, t):
    return r, rescored(t, replace(CUT, normaliser="full"), CUT)


def truncation_undeclared(r, t):
    policy = Policy(temperature=1.0)
    return each(r, support=None, policy=policy, rows=None), rescored(
        t, replace(CUT, normaliser="full"), policy
    )


def top_k_undeclared(r, t):
    policy = Policy(temperature=0.9)
    whole = rescored(t, replace(TOP, top_k=0, normaliser="full"), policy)
    ten = each(r, policy=replace(TOP, top_k=10))
    kept = each(score(ten), policy=policy, support=None, rows=None)
    return kept, whole


def other_top_p(r, t):
    return r, each(t, policy=replace(CUT, top_p=0.9))


def highest_id_in_support(r, t):
    """Two tokens tie at the edge of top-k, and each side keeps another."""

    def tied(one):
        rows = one.rows.clone()
        for at, ids in enumerate(one.support):
            spare = next(i for i in range(rows.shape[1]) if i not in ids)
            edge = min((i for i in ids if i != one.tokens[at]), key=lambda i: rows[at, i])
            rows[at, spare] = rows[at, edge]
        return rows

    def swapped(one):
        found = []
        for at, ids in enumerate(one.support):
            spare = next(i for i in range(one.rows.shape[1]) if i not in ids)
            edge = min((i for i in ids if i != one.tokens[at]), key=lambda i: one.rows[at, i])
            found.append(tuple(spare if i == edge else i for i in ids))
        return tuple(found)

    t = each(t, support=swapped)
    return each(r, rows=tied), t


def greedy_tie(r, t):
    """The third token's row has two largest, and the trainer's own decoding takes the other."""

    def rows(one):
        found = one.rows.clone()
        found[2, (one.tokens[2] + 1) % found.shape[1]] = found[2, one.tokens[2]]
        return found

    def tokens(one):
        other = (one.tokens[2] + 1) % one.rows.shape[1]
        return (*one.tokens[:2], other, *one.tokens[3:])

    r, t = each(r, rows=rows), each(t, rows=rows)
    return r, each(t, tokens=tokens)


def shifted_logprobs(r, t):
    return r, each(t, logprobs=lambda s: s.logprobs.roll(1), rows=None)


def shifted_ahead(r, t):
    return r, each(t, logprobs=lambda s: s.logprobs.roll(-1), rows=None)


def shifted_ids(r, t):
    return r, each(t, tokens=lambda s: (*s.tokens[1:], 0))


def last_token_masked(r, t):
    return r, each(t, mask=torch.arange(NEW) < NEW - 1)


def first_token_masked(r, t):
    return each(r, mask=torch.arange(NEW) > 0), t


def begin_of_sequence_added(r, t):
    return r, each(t, prompt=lambda s: (1, *s.prompt))


def tokenized_again(r, t):
    return r, each(t, tokens=lambda s: (*s.tokens[:4], (s.tokens[4] + 1) % 97, *s.tokens[5:]))


def padding_in_positions(r, t):
    return r, each(t, positions=lambda s: tuple(p + 2 for p in s.positions))


def logits_for_logprobs(r, t):
    shift = 4.0
    return r, each(t, logprobs=lambda s: s.logprobs + shift, rows=lambda s: s.rows + shift)


def normalised_over_a_part(r, t):
    """The trainer leaves the last 40 tokens of the vocabulary out of its normaliser."""

    def rows(one):
        cut = one.rows.clone()
        cut[:, -40:] = -torch.inf
        return one.rows - cut.logsumexp(-1, keepdim=True)

    t = each(t, rows=rows)
    return r, each(t, logprobs=lambda s: s.rows.gather(1, torch.tensor(s.tokens)[:, None])[:, 0])


def a_sequence_dropped(r, t):
    return r, replace(t, sequences=t.sequences[:-1])


def a_penalty_on_one_side(r, t):
    return each(r, policy=replace(HOT, processors=("repetition_penalty",))), each(
        t, policy=replace(HOT, processors=())
    )
