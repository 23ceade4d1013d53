"""Run GRPO with rollouts by vLLM: the KL between vLLM and the trainer is exactly 0 with isobit, and not with stock.

vLLM and the trainer are two processes with two environments (./setup_dev and ./setup_vllm). After every step the
trainer saves its weights and vLLM reloads them. Writes grpo_vllm.svg.

    python examples/grpo_vllm.py --steps 40
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP, NEW, WANTED = 4, 4, 16, 16
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


# ---- vLLM's process ----------------------------------------------------------------------------------------------


def serve(folder, engine):
    """Answer each line {weights, prompts, seeds} on standard input with a line {tokens, logprobs}."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what vLLM prints is no answer
    import torch
    from vllm import LLM, SamplingParams

    import isobit

    torch._dynamo.config.disable = (
        True  # stock vLLM compiles one count; nothing else here is compiled
    )
    if engine == "isobit":
        isobit.integrations.vllm.enable()
    llm = LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=128,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": asked["weights"]})
        llm.reset_prefix_cache()  # its keys are of the weights before
        params = [
            SamplingParams(seed=seed, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False)
            for seed in asked["seeds"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        made = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        answer = {
            "tokens": [list(one.token_ids) for one in made],
            "logprobs": [
                [row[token].logprob for token, row in zip(one.token_ids, one.logprobs, strict=True)]
                for one in made
            ],
        }
        print(json.dumps(answer), file=answers, flush=True)


# ---- the trainer's process ---------------------------------------------------------------------------------------


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
    command = [python, __file__, "--serve", folder, "--engine", engine]
    history = []
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **VLLM},
    ) as vllm:
        for step in range(steps):
            lengths = torch.randint(3, 12, (PROMPTS,), generator=draw).tolist()
            prompts = [torch.randint(0, 64, (n,), generator=draw).tolist() for n in lengths]
            prompts = [prompt for prompt in prompts for _ in range(GROUP)]
            model.save_pretrained(folder)
            seeds = [step * 1000 + row for row in range(len(prompts))]
            asked = {"weights": folder, "prompts": prompts, "seeds": seeds}
            vllm.stdin.write(json.dumps(asked) + "\n")
            vllm.stdin.flush()
            answer = json.loads(vllm.stdout.readline())
            tokens, rolled = answer["tokens"], torch.tensor(answer["logprobs"])
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--picture", default="grpo_vllm.svg")
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.engine)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from zero_kl import HEADS, SIZES, draw

    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    histories, failed = {}, False
    for engine in ("stock", "isobit"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)).to(torch.bfloat16).save_pretrained(
                folder
            )
            history = train(folder, engine, options.steps, options.vllm_python)
        histories[engine] = [row[:3] for row in history]
        different, compared = (sum(row[4][at] for row in history) for at in (0, 1))
        zero = sum(row[0] == 0 for row in history)
        print(
            f"{engine:6}  KL exactly 0 in {zero} of {len(history)} steps, largest "
            f"{max(row[0] for row in history):.3g}; {different} of {compared} log-probabilities differ, "
            f"by up to {max(row[1] for row in history):.3g}; clipped at most "
            f"{max(row[3] for row in history):.2%}; reward {history[0][2]:.3f} to {history[-1][2]:.3f}"
        )
        failed |= engine == "isobit" and (different > 0 or not compared)
    draw(histories, options.picture)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
