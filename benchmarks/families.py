"""Model types of transformers, small and with random weights: bits in every layout of a batch, and against stock.

Each row is one type in one dtype, in strict mode. A number is how many samples or parameters have other bits than those
of the sample alone, or of the left-padded batch; 0 is equal. `|enabled - stock|` is in nats of log-probability.
"""

import copy
import warnings

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

import isobit
from isobit import bits
from isobit.parallel import GlobalBatch, Gradients

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
    "attention_dropout": 0.0,
}
WINDOW = {"sliding_window": 8}
BOTH = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
# Groups of experts, of which some can be chosen, and a shared expert in all layers but the first.
SHARED = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
# What a type needs besides: a window, kinds of layers, options that make it differ from others, dropout that is off.
TYPES = {
    "llama": {},
    "qwen2": {**BOTH, "use_sliding_window": True},
    "qwen3": {},
    "mistral": WINDOW,
    "ministral": BOTH,
    "olmo2": {},
    "olmo3": BOTH,
    "phi3": {**WINDOW, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "glm": {},
    "glm4": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
    "gemma": {},
    "gemma3_text": {**BOTH, "query_pre_attn_scalar": 16},
    "seed_oss": {"residual_dropout": 0.0},
    "arcee": {},
    "exaone4": BOTH,
    "cwm": BOTH,
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "helium": {},
    "starcoder2": {**WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "qwen3_moe": {**MIXTURE, "norm_topk_prob": True},
    "mixtral": {**MIXTURE, **WINDOW},
    "olmoe": MIXTURE,
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 40},
    "glm4_moe": {**MIXTURE, **SHARED, "use_qk_norm": True},
    "deepseek_v3": {
        **MIXTURE,
        **SHARED,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    },
    "gpt_oss": {
        **MIXTURE,
        **BOTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "stablelm": {"partial_rotary_factor": 0.5, "hidden_dropout": 0.0},
}
# Linear attention in the first layer, softmax attention in the second.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GATED = {**MIXTURE, "shared_expert_intermediate_size": 40}
TYPES |= {
    "qwen3_next": {**LINEAR, **GATED},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **GATED},
}
TYPES |= {
    "gemma2": {
        **BOTH,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 0.5,
        "initializer_range": 0.1,  # so that the caps change scores and logits
    },
    # Chunks and rotary embeddings in the first layer; a factor of the position in the second.
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "moe_layers": [1],
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "attn_scale": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# Encoders: the logits of masked tokens, and scores of samples by their first token. A token sees 8 of each side.
ENCODERS = {
    "modernbert": {
        "local_attention": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "cls_token_id": 1,
        "sep_token_id": 1,
        "num_labels": 3,
    },
}
LENGTHS, ROOM = (19, 34, 9, 26), 36
GENERATED = 12
COLUMNS = (
    "left",
    "right",
    "packed",
    "pieces",
    "decoded",
    "generated",
    "gradients left/right",
    "gradients left/packed",
    "gradients 1/2/4 micro-batches",
    "routes",
)
# Columns of the table: how many of 4 samples, or of the parameters' gradients, have other bits.
HEADINGS = {
    "stock samples": "stock: samples",
    "stock gradients": "stock: grads",
    "left": "left",
    "right": "right",
    "packed": "packed",
    "pieces": "pieces",
    "decoded": "decoded",
    "generated": "generate",
    "gradients left/right": "grads L/R",
    "gradients left/packed": "grads L/packed",
    "gradients 1/2/4 micro-batches": "grads 1/2/4",
    "stock routes": "stock: routes",
    "routes": "routes",
    "|enabled - stock|": "from stock, nats",
    "|gradient - stock's|": "grads from stock",
}


def build(kind, dtype, head=MODEL_FOR_MASKED_LM_MAPPING_NAMES):
    """A small model of a type, whose vectors are not all ones or zeros, with frequencies in fp32.

    `head` has the classes of encoders.
    """
    torch.manual_seed(1)
    sizes = {**SIZES, **(TYPES[kind] if kind in TYPES else ENCODERS[kind])}
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in TYPES else head
    model = getattr(transformers, names[kind])(CONFIG_MAPPING[kind](**sizes)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        if name.endswith("A_log"):
            # Slow decays: with those of a fresh layer, 5 to 18 per token, stock's gradients of A_log are off by 3e-4.
            parameter.data.sub_(3.0)
    kept = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    model.to(dtype)
    for name, frequencies in kept.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._buffers[key] = frequencies
    return model


def samples_of(vocabulary=96):
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(2, vocabulary, (1, n), generator=drawn) for n in LENGTHS]


def padded(samples, side):
    ids = torch.zeros(len(samples), ROOM, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        n = sample.shape[1]
        at = slice(0, n) if side == "right" else slice(ROOM - n, ROOM)
        ids[row, at], mask[row, at] = sample[0], 1
    return ids, mask


def rows_of(values, side):
    """The rows of each sample of a padded batch."""
    found = []
    for row, n in enumerate(LENGTHS):
        found.append(values[row, :n] if side == "right" else values[row, ROOM - n :])
    return found


def packed(samples):
    return torch.cat(samples, 1), torch.cat([torch.arange(n) for n in LENGTHS])[None]


def differing(left, right):
    """How many pairs of tensors do not have the same bits."""
    assert len(left) == len(right) > 0
    return sum(
        not bits.equal(a.contiguous(), b.contiguous()) for a, b in zip(left, right, strict=True)
    )


def places_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def scored(logits, sample):
    every = torch.log_softmax(logits.float(), -1)
    return every[:-1].gather(1, sample[0, 1:, None]).squeeze(1)


@torch.no_grad()
def score_stock(model, samples):
    """Log-probabilities of each sample alone, and how many of them a left-padded batch changes."""
    alone = [scored(model(sample, use_cache=False).logits[0], sample) for sample in samples]
    ids, mask = padded(samples, "left")
    logits = model(ids, attention_mask=mask, position_ids=places_of(mask), use_cache=False).logits
    rows = [scored(z, s) for z, s in zip(rows_of(logits, "left"), samples, strict=True)]
    return alone, differing(alone, rows)


@torch.no_grad()
def differing_routes(model, samples):
    """How many tokens of any layer go to other experts in a padded batch than alone; 0 where there are no routers."""
    found = []

    def note(module, inputs, output):
        # A stock router that gives scores of all experts has no list of the chosen ones.
        found.append(output[2] if len(output) > 2 else output[0].topk(module.top_k).indices)

    ends = (".mlp.gate", ".mlp.router", ".feed_forward.router")
    names = [n for n, _ in model.named_modules() if n.endswith(ends)]
    hooks = [model.get_submodule(name).register_forward_hook(note) for name in names]
    wrong = 0
    try:
        for side in ("left", "right"):
            ids, mask = padded(samples, side)
            model(ids, attention_mask=mask, position_ids=places_of(mask), use_cache=False)
            batched = [chosen.view(len(samples), ROOM, -1) for chosen in found]
            found.clear()
            for row, sample in enumerate(samples):
                model(sample, use_cache=False)
                for every, alone in zip(batched, found, strict=True):
                    other = rows_of(every, side)[row].sort(1).values
                    wrong += int((other != alone.sort(1).values).any(1).sum())
                found.clear()
    finally:
        for hook in hooks:
            hook.remove()
    return wrong


# A mixture with many experts, whose scores nearly tie: the size at which stock's routes differ.
MANY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}


@torch.no_grad()
def chosen_experts(model, ids, cache=None):
    """The experts of each token, by layer: [layers, B, T, k], ascending."""
    found = []

    def note(module, inputs, output):
        found.append(output[2].view(*ids.shape, -1).sort(-1).values)

    gates = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(note) for gate in gates]
    model(ids, past_key_values=cache, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def routes_of_a_rollout(model, samples=4, tokens=24, batch=32):
    """(routes that differ from the trainer's, routes): of samples alone, and decoded together and alone."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(0, MANY["vocab_size"], (batch, tokens), generator=drawn)
    trained = chosen_experts(model, ids)
    alone = [chosen_experts(model, ids[row : row + 1]) for row in range(samples)]
    found = {"alone": torch.cat(alone, 1)}
    for name, rows in (("decoded together", samples), ("decoded alone", 1)):
        cache = transformers.DynamicCache()
        steps = [chosen_experts(model, ids[:rows, at : at + 1], cache) for at in range(tokens)]
        found[name] = torch.cat(steps, 2)
    return {
        name: (int((e != trained[:, : e.shape[1]]).any(-1).sum()), e[..., 0].numel())
        for name, e in found.items()
    }


def compare_routes(console):
    """Print stock's and isobit's routes against a trainer's batch; return whether only stock's differ."""
    table, differ = Table("routes of 128 experts, bf16", "against a batch of 32", "differ"), {}
    for name in ("stock", "isobit"):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**MANY)
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        if name == "isobit":
            isobit.enable(model)
        for how, (wrong, total) in routes_of_a_rollout(model).items():
            table.add_row(name, how, f"{wrong} of {total}")
            differ[name] = differ.get(name, 0) + wrong
    console.print(table)
    return differ["stock"] > 0 and differ["isobit"] == 0


def labelled(ids, mask):
    """Labels that leave out padding and, as packed samples do, the first token of each sample."""
    return ids.masked_fill(mask == 0, -100)


def gradients_of(model, **inputs):
    model.zero_grad(set_to_none=True)
    model(use_cache=False, **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stock_gradients(model, samples):
    """Stock's gradients of the samples one by one, weighted as one batch: padding enters none of them."""
    model.zero_grad(set_to_none=True)
    total = sum(LENGTHS) - len(LENGTHS)
    for sample in samples:
        loss = model(sample, labels=sample, use_cache=False).loss
        (loss * (sample.shape[1] - 1) / total).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def pieces(model, samples, cuts):
    """Logits of each sample by itself, in pieces behind a cache of the model's own kind."""
    found = []
    for sample in samples:
        cache, made, at = DynamicCache(config=model.config), [], 0
        while at < sample.shape[1]:
            step = cuts[len(made) % len(cuts)]
            made.append(model(sample[:, at : at + step], past_key_values=cache).logits[0])
            at += step
        found.append(torch.cat(made))
    return found


@torch.no_grad()
def decoded(model, samples):
    """Logits of a left-padded batch, the last tokens one by one behind a cache."""
    ids, mask = padded(samples, "left")
    cache, first = DynamicCache(config=model.config), ROOM - 4
    made = [model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache).logits]
    for at in range(first, ROOM):
        made.append(
            model(
                ids[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache
            ).logits
        )
    return rows_of(torch.cat(made, 1), "left")


@torch.no_grad()
def generated(model, samples):
    """How many samples' logits of generate(), past the window, are not those of one call with all tokens."""
    ids, mask = padded(samples, "left")
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=GENERATED,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps, wrong = torch.stack(out.logits, 1), 0
    for row, n in enumerate(LENGTHS):
        whole = out.sequences[row : row + 1, ROOM - n :]
        logits = model(whole[:, :-1], use_cache=False).logits[0, n - 1 :]
        wrong += not bits.equal(logits.contiguous(), steps[row].float().contiguous())
    return wrong


def in_micro_batches(model, samples, count, label=labelled):
    """Gradients of the four samples in this number of micro-batches."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    batch = GlobalBatch(total=len(samples), micro_batches=count)
    gradients = Gradients(model, batch)
    ids, mask = padded(samples, "left")
    labels = label(ids, mask)
    # The first token of a sample has no logits of a causal model.
    total = int((labels != -100).sum()) - len(LENGTHS) * (label is labelled)
    more = {"use_cache": False} if label is labelled else {}
    for micro in range(count):
        rows = batch.samples(0, micro)
        with gradients.micro_batch(micro):
            model(
                ids[rows],
                attention_mask=mask[rows],
                labels=labels[rows],
                num_items_in_batch=total,
                **more,
            ).loss.backward()
    # The second use of a tied weight is a leaf without a gradient of its own.
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def judge(kind, dtype):
    """Everything of one type: numbers that differ by column, stock's, and differences from stock."""
    model, samples = build(kind, dtype), samples_of()
    stock, stock_differ = score_stock(model, samples)
    model.train()
    theirs = stock_gradients(model, samples)
    sides = {}
    for side in ("left", "right"):
        ids, mask = padded(samples, side)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labelled(ids, mask)}
        sides[side] = gradients_of(model, **inputs, position_ids=places_of(mask))
    found = {
        "stock samples": stock_differ,
        "stock gradients": differing([*sides["left"].values()], [*sides["right"].values()]),
    }
    model.eval()
    found["stock routes"] = differing_routes(model, samples)
    isobit.enable(model)
    found["routes"] = differing_routes(model, samples)
    with torch.no_grad():
        alone = [isobit.logprobs(model, sample)[0, :-1] for sample in samples]
        logits = [model(sample, use_cache=False).logits[0] for sample in samples]
        for side in ("left", "right"):
            rows = rows_of(isobit.logprobs(model, *padded(samples, side)), side)
            found[side] = differing(alone, [row[:-1] for row in rows])
        ids, places = packed(samples)
        rows = isobit.logprobs(model, ids, position_ids=places)[0].split(LENGTHS)
        found["packed"] = differing(alone, [row[:-1] for row in rows])
    found["pieces"] = differing(logits, pieces(model, samples, (5, 1, 11)))
    found["decoded"] = differing(logits, decoded(model, samples))
    found["generated"] = generated(model, samples)
    found["|enabled - stock|"] = max(
        float((a - b).abs().max()) for a, b in zip(alone, stock, strict=True)
    )
    model.train()
    made = {}
    for side in ("left", "right"):
        ids, mask = padded(samples, side)
        made[side] = gradients_of(
            model, input_ids=ids, attention_mask=mask, labels=labelled(ids, mask)
        )
    ids, places = packed(samples)
    made["packed"] = gradients_of(model, input_ids=ids, position_ids=places, labels=ids)
    left = [*made["left"].values()]
    found["gradients left/right"] = differing(left, [*made["right"].values()])
    found["gradients left/packed"] = differing(left, [*made["packed"].values()])
    one = in_micro_batches(model, samples, 1)
    found["gradients 1/2/4 micro-batches"] = sum(
        differing(one, in_micro_batches(model, samples, n)) for n in (2, 4)
    )
    found["|gradient - stock's|"] = max(
        float((mine - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30))
        for name, mine in made["left"].items()
    )
    found["parameters"] = len(left)
    return found


def encoded(model, samples):
    """What an encoder returns of each sample alone, and of batches of all of them: padded, packed."""
    alone = [model(sample).logits[0] for sample in samples]
    made = {}
    for side in ("left", "right"):
        ids, mask = padded(samples, side)
        logits = model(ids, attention_mask=mask, position_ids=places_of(mask)).logits
        made[side] = rows_of(logits, side) if logits.dim() == 3 else [*logits]
    return alone, made


def masked(ids, mask):
    """Labels of every third token of each sample."""
    return labelled(ids, mask).masked_fill(places_of(mask) % 3 != 1, -100)


def judge_encoder(kind, dtype):
    """As `judge`, of an encoder: its tokens see both sides, so that nothing is decoded."""
    samples, found = samples_of(), {}
    model = build(kind, dtype)
    scores = build(kind, dtype, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    with torch.no_grad():
        stock, made = encoded(model, samples)
        found["stock samples"] = differing(stock, made["right"])
    model.train()
    total = sum(int((masked(s, torch.ones_like(s)) != -100).sum()) for s in samples)
    model.zero_grad(set_to_none=True)
    for sample in samples:
        labels = masked(sample, torch.ones_like(sample))
        loss = model(sample, labels=labels).loss
        (loss * int((labels != -100).sum()) / total).backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    isobit.enable(model)
    isobit.enable(scores)
    made = {}
    for side in ("left", "right"):
        ids, mask = padded(samples, side)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": masked(ids, mask)}
        made[side] = encoder_gradients(model, **inputs)
    ids, places = packed(samples)
    labels = torch.cat([masked(s, torch.ones_like(s)) for s in samples], 1)
    made["packed"] = encoder_gradients(model, input_ids=ids, position_ids=places, labels=labels)
    left = [*made["left"].values()]
    found["gradients left/right"] = differing(left, [*made["right"].values()])
    found["gradients left/packed"] = differing(left, [*made["packed"].values()])
    one = in_micro_batches(model, samples, 1, masked)
    found["gradients 1/2/4 micro-batches"] = sum(
        differing(one, in_micro_batches(model, samples, n, masked)) for n in (2, 4)
    )
    found["|gradient - stock's|"] = max(
        float((mine - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30))
        for name, mine in made["left"].items()
    )
    found["parameters"] = len(left)
    found["stock gradients"] = stock_encoder_gradients(kind, dtype, samples)
    found |= dict.fromkeys(("left", "right", "packed"), 0)
    with torch.no_grad():
        for one in (model.eval(), scores):
            alone, sides = encoded(one, samples)
            whole = one(ids, position_ids=places).logits
            sides["packed"] = whole[0].split(LENGTHS) if whole.dim() == 3 else [*whole]
            for layout, rows in sides.items():
                found[layout] += differing(alone, [*rows])
        alone = [torch.log_softmax(row.float(), -1) for row in encoded(model, samples)[0]]
    stock = [torch.log_softmax(row.float(), -1) for row in stock]
    found["|enabled - stock|"] = max(
        float((a - b).abs().max()) for a, b in zip(alone, stock, strict=True)
    )
    return found


def encoder_gradients(model, **inputs):
    model.zero_grad(set_to_none=True)
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stock_encoder_gradients(kind, dtype, samples):
    """How many of stock's gradients differ between batches that are padded to two widths."""
    model, sides = build(kind, dtype).train(), []
    for width in (ROOM, ROOM + 9):
        ids, mask = (
            torch.nn.functional.pad(t, (0, width - ROOM)) for t in padded(samples, "right")
        )
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": masked(ids, mask)}
        sides.append([*encoder_gradients(model, **inputs).values()])
    return differing(*sides)


def run(quick, threads, dtypes):
    """Print one row per type and dtype."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    table = Table("type", "dtype", *HEADINGS.values())
    kinds, bad = list(TYPES)[:5] if quick else [*TYPES, *ENCODERS], 0
    for kind in kinds:
        for dtype in dtypes:
            found = (judge if kind in TYPES else judge_encoder)(kind, getattr(torch, dtype))
            bad += any(found.get(name) for name in COLUMNS)
            cells = [f"{found[n]:.1e}" if "|" in n else str(found.get(n, "-")) for n in HEADINGS]
            table.add_row(kind, dtype, *cells)
    console = Console(highlight=False, width=260)
    console.print(table)
    rows = len(kinds) * len(dtypes)
    console.print(f"{len(kinds)} types, {rows} rows, {bad} with a difference in any layout")
    return 0 if compare_routes(console) and not bad else 1
