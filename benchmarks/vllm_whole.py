"""A model of Qwen3-0.6B's architecture in vLLM, bit for bit: in batches against alone, and against the trainer.

The weights are random, and the prompts few and short; the architecture is whole: 28 layers, a tied head of 151,936
tokens. Needs ./setup_vllm, 6 GB of memory and 1.2 GB of disk. Stock vLLM is the control. Rollouts are bf16.
"""

import tempfile
from pathlib import Path

import torch
import transformers

from benchmarks import vllm

CONFIG = {  # of Qwen/Qwen3-0.6B
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WORK = ["--requests=6", "--new=6", "--longest=40", "--shared=0", "--axes=arrival"]
WORK += ["--sizes", "1", "2", "3", "6"]
QUICK = ["--requests=4", "--new=4", "--longest=24", "--shared=0", "--axes", "--sizes", "1", "4"]


def run(quick, threads, dtypes):
    """Print a table; return 1 if isobit differs anywhere, nothing was compared, or stock never differs."""
    found = vllm.Findings()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**CONFIG)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        model.save_pretrained(folder)
        del model
        counts = {"isobit": 1, "stock": 1}
        found.compare("Qwen3-0.6B", folder, "bfloat16", counts, QUICK if quick else WORK)
    return found.conclude()
