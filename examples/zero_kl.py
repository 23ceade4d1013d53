"""Run GRPO on a tiny Qwen3: the KL between rollout and trainer is exactly 0 with isobit, and not with stock.

Rollouts are drawn by generate() with a cache, prompts padded on the left; the trainer scores them as one batch
padded on the right. Both sides start from the same weights and draw with the same keys. Writes zero_kl.svg.
"""

import argparse
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import isobit
from isobit.report.markup import Canvas

PROMPTS, GROUP, NEW, WANTED = 4, 4, 16, 16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}


def roll_out(model, prompts, step):
    """Return tokens and their log-probabilities as the sampler computed them."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack(
        [torch.cat((torch.zeros(width - len(p), dtype=torch.int64), p)) for p in prompts]
    )
    mask = torch.stack([(torch.arange(width) >= width - len(p)).long() for p in prompts])
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        logits_processor=[isobit.KeyedSampling(step, attention_mask=mask)],
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[:, -NEW:]
    return tokens, select(torch.stack(made.logits, dim=1), tokens, is_enabled(model))


def score(model, prompts, tokens):
    """Return log-probabilities of the same tokens as the trainer computes them, with gradients."""
    whole = [torch.cat(pair) for pair in zip(prompts, tokens, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in whole], batch_first=True
    )
    places = torch.stack([torch.arange(len(p) - 1, len(p) - 1 + NEW) for p in prompts])
    if is_enabled(model):
        return isobit.logprobs(model, ids, mask).gather(1, places)
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    return select(
        logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])), tokens, False
    )


def select(logits, tokens, ordered):
    """Return log p of each token."""
    log_p = isobit.log_softmax(logits) if ordered else torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens[..., None])[..., 0]


def is_enabled(model):
    return model.config._attn_implementation == "isobit"


def train(model, steps):
    """Return (KL, largest difference, reward) per step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    history = []
    for step in range(steps):
        lengths = torch.randint(3, 12, (PROMPTS,), generator=generator).tolist()
        prompts = [torch.randint(0, 64, (n,), generator=generator) for n in lengths]
        prompts = [prompt for prompt in prompts for _ in range(GROUP)]
        tokens, rolled = roll_out(model, prompts, step)
        reward = (tokens < WANTED).float().mean(-1).view(PROMPTS, GROUP)
        advantage = (
            (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        ).view(-1, 1)
        scored = score(model, prompts, tokens)
        ratio = (scored - rolled).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        d = (scored.detach() - rolled).double()
        history.append(
            (float((torch.expm1(d) - d).mean()), float(d.abs().max()), float(reward.mean()))
        )
    return history


def draw(histories, path):
    """Draw KL per step on a logarithmic scale, with a separate line for exactly 0, and the reward."""
    canvas, left, width = Canvas(), 70, 560
    low, high = -14, 0
    canvas.text(left, 22, "KL between rollout and trainer, by step", "title")
    canvas.panel(left, 36, width, 190)

    def height(value):
        return (
            206.0
            if value <= 0
            else 176 - (min(max(math.log10(value), low), high) - low) / (high - low) * 130
        )

    for power in range(low, high + 1, 2):
        canvas.text(left - 8, height(10.0**power) + 4, f"1e{power}", "quiet", "end")
        canvas.line(left, height(10.0**power), left + width, height(10.0**power), "axis hair")
    canvas.text(left - 8, 210, "exactly 0", "quiet", "end")
    canvas.text(left, 262, "reward", "title")
    canvas.panel(left, 274, width, 90)
    for (name, history), kind in zip(histories.items(), ("differs", "same"), strict=True):
        for step, (divergence, _, reward) in enumerate(history):
            x = left + 10 + step * (width - 20) / max(len(history) - 1, 1)
            canvas.dot(x, height(divergence), 3, kind, f"{name}, step {step}: KL {divergence:.3g}")
            canvas.dot(x, 354 - reward * 70, 2.5, kind, f"{name}, step {step}: reward {reward:.3f}")
    for row, (name, kind) in enumerate((("stock", "differs"), ("isobit", "same"))):
        canvas.dot(left + width + 16, 50 + 20 * row, 4, kind)
        canvas.text(left + width + 26, 54 + 20 * row, name)
    Path(path).write_text(canvas.document(left + width + 90, 380))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", default="zero_kl.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    histories = {}
    for name in ("stock", "isobit"):
        torch.manual_seed(0)
        config = Qwen3Config(**SIZES, **HEADS)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if name == "isobit":
            model = isobit.enable(model)
        histories[name] = train(model, options.steps)
        zero = sum(kl == 0 and largest == 0 for kl, largest, _ in histories[name])
        worst = max(largest for _, largest, _ in histories[name])
        first, last = histories[name][0][2], histories[name][-1][2]
        print(
            f"{name:7} KL exactly 0 at {zero} of {options.steps} steps; largest |Δ log p| {worst:.3g}; "
            f"reward {first:.2f} → {last:.2f}"
        )
    draw(histories, options.picture)
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
