"""Run GRPO with rollouts by vLLM: the KL between vLLM and the trainer is exactly 0 with isobit, and not with stock.

vLLM and the trainer are two processes with two environments (./setup_dev and ./setup_vllm). After every step the
trainer saves its weights and vLLM reloads them. Writes grpo_vllm.svg.

    python examples/grpo_vllm.py --steps 40
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP, NEW, WANTED = 4, 4, 16, 16


def score(model, prompts, tokens, engine):
    """Return log-probabilities of the tokens as the trainer computes them, in one padded batch, with gradients."""
    import torch

    import isobit

    whole = [torch.tensor(prompt + made) for prompt, made in zip(prompts, tokens, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(whole, batch_first=True)
    mask = pad([torch.ones_like(row) for row in whole], batch_first=True)
    places = torch.stack([torch.arange(len(p) - 1, len(p) - 1 + NEW) for p in prompts])
    if engine == "isobit":
        return isobit.logprobs(model, ids, mask).gather(1, places)
    logits = model(ids, attention_mask=mask, use_cache=False).logits.float()
    chosen = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return chosen.gather(1, places)


def train(folder, engine, steps, python):
    """Return (KL, largest difference, reward, share of clipped ratios, log-probabilities that differ) per step."""
    import torch
    from transformers import AutoModelForCausalLM

    import isobit

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if engine == "isobit":
        model = isobit.enable(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    history = []
    with isobit.integrations.vllm.Rollouts(model, python, max_model_len=128, engine=engine) as vllm:
        for step in range(steps):
            lengths = torch.randint(3, 12, (PROMPTS,), generator=draw).tolist()
            prompts = [torch.randint(0, 64, (n,), generator=draw).tolist() for n in lengths]
            prompts = [prompt for prompt in prompts for _ in range(GROUP)]
            vllm.update_weights(model)
            requests = range(step * 1000, step * 1000 + len(prompts))
            made = vllm.generate(prompts, seed=0, requests=requests, max_tokens=NEW)
            tokens = [one.tokens for one in made]
            rolled = torch.tensor([one.logprobs for one in made])
            reward = (torch.tensor(tokens) < WANTED).float().mean(-1).view(PROMPTS, GROUP)
            spread = reward.std(1, keepdim=True) + 1e-4
            advantage = ((reward - reward.mean(1, keepdim=True)) / spread).view(-1, 1)
            scored = score(model, prompts, tokens, engine)
            ratio = (scored - rolled).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            apart = (scored.detach() - rolled).double()
            history.append(
                (
                    float((torch.expm1(apart) - apart).mean()),
                    float(apart.abs().max()),
                    float(reward.mean()),
                    float(((ratio < 0.8) | (ratio > 1.2)).float().mean()),
                    (int((apart != 0).sum()), apart.numel()),
                )
            )
    return history


def describe(history):
    """Return a run's measures in words, and how many log-probabilities differ of how many."""
    kls, largest, rewards, clipped, counts = zip(*history, strict=True)
    differ, compared = (sum(count) for count in zip(*counts, strict=True))
    measures = {
        "steps whose KL is exactly 0": f"{sum(kl == 0 for kl in kls)} of {len(kls)}",
        "largest KL of a step": f"{max(kls):.3g}",
        "log-probabilities that differ": f"{differ:,} of {compared:,}",
        "by up to": f"{max(largest):.3g}",
        "ratios clipped, at most": f"{max(clipped):.2%}",
        "reward, first and last step": f"{rewards[0]:.3f}, {rewards[-1]:.3f}",
    }
    return measures, differ, compared


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", default="grpo_vllm.svg")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    options = parser.parse_args()
    import torch
    from rich.console import Console
    from rich.table import Table
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from zero_kl import HEADS, SIZES, draw

    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    histories, columns, failed = {}, {}, False
    for engine in ("stock", "isobit"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)).to(torch.bfloat16).save_pretrained(
                folder
            )
            history = train(folder, engine, options.steps, options.vllm_python)
        histories[engine] = [row[:3] for row in history]
        columns[engine], differ, compared = describe(history)
        failed |= engine == "isobit" and (differ > 0 or not compared)
    table = Table(f"GRPO with vLLM, {options.steps} steps, bf16", *columns)
    for measure in columns["isobit"]:
        table.add_row(measure, *(column[measure] for column in columns.values()))
    Console(width=100, highlight=False).print(table)
    draw(histories, options.picture)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
