"""Models with LoRA adapters, the layouts of their samples, and what each layout gives."""

import peft
import torch
import transformers

import isobit
from isobit import bits
from isobit.parallel import GlobalBatch, Gradients
from isobit.sampling import dropout_key

LENGTHS = (7, 12, 3, 9)
SAMPLES = [
    torch.randint(1, 128, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
]
EVERY_SAMPLE = range(len(LENGTHS))
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Qwen3": {"head_dim": 16},
    "Qwen2": {},
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Olmo2": {},
    "Phi3": {},
}


def plain(family="Qwen3", dtype=torch.float32, seed=1):
    """Return a small stock model with weights of a usual size."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    angles = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(dtype)
    for name, buffer in angles.items():  # fp32, as from_pretrained leaves them
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = buffer
    return model


def adapted(family="Qwen3", dtype=torch.float32, *, second=None, seed=2, **asked):
    """Return a PEFT model whose adapters are not zero; `second` are the options of another active adapter."""
    asked = {"r": 4, "target_modules": "all-linear", **asked}
    model = peft.get_peft_model(
        plain(family, dtype), peft.LoraConfig(task_type="CAUSAL_LM", **asked)
    )
    if second is not None:
        model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", **second))
        model.base_model.set_adapter(["default", "second"])
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def padded(side, which=EVERY_SAMPLE, extra=2):
    width = max(LENGTHS[i] for i in which) + extra
    ids = torch.zeros(len(which), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, at in enumerate(which):
        place = slice(width - LENGTHS[at], None) if side == "left" else slice(LENGTHS[at])
        ids[row, place], mask[row, place] = SAMPLES[at][0], 1
    return ids, mask


def packed():
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return torch.cat(SAMPLES, 1), positions


@torch.no_grad()
def differing_layouts(model):
    """Return the layouts in which log-probabilities or logits of a sample differ from those of the sample alone."""
    alone = [isobit.logprobs(model, ids)[0, :-1] for ids in SAMPLES]
    found = []
    for side in ("left", "right"):
        ids, mask = padded(side)
        rows = isobit.logprobs(model, ids, mask)
        ours = [rows[i][mask[i].bool()][:-1] for i in range(len(LENGTHS))]
        found += [side] * (not same(ours, alone))
    ids, positions = packed()
    rows = isobit.logprobs(model, ids, position_ids=positions)[0].split(LENGTHS)
    found += ["packed"] * (not same([row[:-1] for row in rows], alone))
    ids, mask = padded("left")
    whole, cut = model(ids, attention_mask=mask).logits, 11
    cache, parts = transformers.DynamicCache(), []
    for at in (slice(cut), *(slice(i, i + 1) for i in range(cut, ids.shape[1]))):
        step = {"attention_mask": mask[:, : at.stop], "past_key_values": cache, "use_cache": True}
        parts.append(model(ids[:, at], **step).logits)
    decoded, real = torch.cat(parts, 1), mask.bool()
    found += ["decoded"] * (not bits.equal(decoded[real], whole[real]))
    return found


def same(left, right):
    return all(bits.equal(a, b) for a, b in zip(left, right, strict=True))


def grads_of(model):
    return {n: bits.digest(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def gradients(model, form, step=0):
    """Return digests of the gradients of one backward over all samples, in one layout."""
    model.train()
    model.zero_grad(set_to_none=True)
    if form == "packed":
        ids, positions = packed()
        inputs = {"input_ids": ids, "position_ids": positions, "labels": ids}
    else:
        ids, mask = padded(form)
        labels = ids.masked_fill(mask == 0, -100)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with dropout_key(seed=5, step=step):
        loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return grads_of(model)


def in_micro_batches(model, count, step=0):
    """Return digests of the gradients of all samples in a number of micro-batches, each padded to its own width."""
    model.train()
    model.zero_grad(set_to_none=True)
    batch = GlobalBatch(of=len(LENGTHS), micro_batches=count)
    collector = Gradients(model, batch)
    try:
        for at in range(count):
            which = range(at * batch.size, (at + 1) * batch.size)
            ids, mask = padded("left" if at % 2 else "right", which, extra=at)
            labels = ids.masked_fill(mask == 0, -100)
            with collector.micro_batch(at), dropout_key(seed=5, step=step):
                model(
                    input_ids=ids,
                    attention_mask=mask,
                    labels=labels,
                    num_items_in_batch=sum(LENGTHS) - len(LENGTHS),
                    use_cache=False,
                ).loss.backward()
    finally:
        collector.close()
    return grads_of(model)


def base_digest(model):
    """Return the digest of everything that is not an adapter's."""
    kept = {n: p for n, p in model.named_parameters() if "lora_" not in n and not p.requires_grad}
    return bits.digest(kept)
