"""Tokens per CPU second of vLLM with isobit's worker and of stock vLLM, in turn, in one process with one thread.

A ratio is isobit's rate / stock's in one round; shown are the median and the quartiles of the rounds.
Run by the Python of .venv-vllm: `.venv-vllm/bin/python -m benchmarks.vllm_speed`. The model has random weights.
"""

import os
import statistics
import tempfile
import time

from rich.console import Console
from rich.table import Table

from benchmarks.ratios import ROUNDS, Ratio
from benchmarks.vllm_rollouts import SETTINGS

BATCHES = (1, 8, 16)
PROMPT, NEW = 20, 12


def main():
    os.environ.update(SETTINGS)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from vllm import LLM, SamplingParams

    import isobit
    from isobit.integrations.vllm.preparing import STATE

    torch.set_num_threads(1)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "vocab_size": 4096}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    params = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(**sizes, **heads, max_position_embeddings=256)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        shared = {"model": folder, "dtype": "bfloat16", "max_model_len": 256}
        shared |= {"skip_tokenizer_init": True}
        engines = {
            "stock": LLM(**shared, enforce_eager=True),
            "isobit": LLM(**shared, **isobit.integrations.vllm.engine_arguments()),
        }
    table = Table("batch", "stock, tokens per CPU s", "isobit", "ratio", "quartiles")
    for batch in BATCHES:
        prompts = [
            {"prompt_token_ids": [(7 * row + 3 * at) % 500 for at in range(PROMPT)]}
            for row in range(batch)
        ]
        spent = {name: [] for name in engines}
        for turn in range(ROUNDS + 1):  # the first is not counted
            for name, engine in engines.items():
                begun = time.process_time()
                engine.generate(prompts, params, use_tqdm=False)
                if turn:
                    spent[name].append(time.process_time() - begun)
        rates = [f"{batch * NEW / statistics.median(seconds):.1f}" for seconds in spent.values()]
        table.add_row(str(batch), *rates, *Ratio.of(*spent.values()).cells())
    Console(width=120, highlight=False).print(table)
    model = engines["isobit"].llm_engine.model_executor.driver_worker.worker.model_runner.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    packed = sum(layer.nbytes for layer in model.__dict__[STATE].packed)
    print(f"packed weights: {packed / 2**20:.0f} MiB, beside {weights / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    main()
