"""vLLM's rollouts against each other and against the trainer, bit for bit; stock vLLM is the control.

Needs ./setup_vllm. Models with random weights are saved to a temporary folder. vLLM runs in the environment of
`.venv-vllm`, the trainer here; what they compute travels in files.
"""

import json
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.vllm_rollouts import bits
from isobit.sampling import Truncation

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SIZES = {
    "vocab_size": 515,  # vLLM pads it to 576 rows
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
COUNTED = ("cached tokens", "preemptions")
LINEAR = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # which stock vLLM for the CPU requires
    "linear_value_head_dim": 128,
}
GATED = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
FAMILIES = {
    "Qwen3": {"head_dim": 64},
    "Qwen3Moe": {
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "Llama": {"rope_parameters": LLAMA3},
    "Qwen2": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 48},
    "Phi3": {"original_max_position_embeddings": 1024},
    "Gemma": {"head_dim": 64, "hidden_act": "gelu_pytorch_tanh"},
    "Qwen3_5Text": LINEAR,
    "Qwen3_5MoeText": {**LINEAR, **GATED},
    "Qwen3Next": {**LINEAR, **GATED},
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}


def save_model(family, dtype, folder):
    """Save a model with random weights: large enough that logits differ, norms and biases that are not constants."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def roll_out(folder, dtype, engine, engines, more):
    """Run benchmarks.vllm_rollouts in vLLM's environment and return what it wrote."""
    out = Path(folder) / "found.json"
    command = [str(PYTHON), "-m", "benchmarks.vllm_rollouts", "--model", str(folder)]
    command += ["--dtype", dtype, "--engine", engine, "--out", str(out), "--engines", str(engines)]
    command += more
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(out.read_text())


def score(folder, dtype, found):
    """Return (compared, different, largest): the trainer's log-probabilities, in padded batches, against vLLM's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model, pad = isobit.enable(model.eval()), torch.nn.utils.rnn.pad_sequence
    compared, different, largest = 0, 0, 0.0
    for kind in sorted({tuple(kind) for kind in found["kinds"]}):
        temperature, top_k, top_p = kind
        rows = [row for row, each in enumerate(found["kinds"]) if tuple(each) == kind]
        prompts = [found["prompts"][row] for row in rows]
        made = [found["reference"][row] for row in rows]
        whole = [torch.tensor(p + m[0]) for p, m in zip(prompts, made, strict=True)]
        ids = pad(whole, batch_first=True)
        mask = pad([torch.ones_like(row) for row in whole], batch_first=True)
        targets = torch.full_like(ids, -100)
        for row, (prompt, one) in enumerate(zip(prompts, made, strict=True)):
            targets[row, len(prompt) - 1 : len(prompt) - 1 + len(one[0])] = torch.tensor(one[0])
        with torch.no_grad():
            of_prompt = isobit.logprobs(model, ids, mask)
            of_policy = isobit.logprobs(
                model,
                ids,
                mask,
                targets=targets,
                temperature=temperature or 1.0,
                support=Truncation(top_k, top_p) if top_k or top_p < 1 else None,
            )
        for row, (prompt, (tokens, generated, of_tokens)) in enumerate(
            zip(prompts, made, strict=True)
        ):
            first = len(prompt) - 1
            trained = of_prompt[row, :first].tolist()
            trained += of_policy[row, first : first + len(tokens)].tolist()
            compared += len(trained)
            pairs = list(zip(trained, of_tokens + generated, strict=True))
            different += sum(bits(a) != bits(b) for a, b in pairs)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
    return compared, different, largest


def run(quick, threads, dtypes):
    """Print a table; return 1 if isobit differs anywhere, nothing was compared, or stock never differs."""
    families, engines = (("Qwen3",), 1) if quick else (("Qwen3", "Qwen3Moe", "Llama"), 4)
    found = Findings()
    with tempfile.TemporaryDirectory() as place:
        for family in families:
            for dtype in dtypes:
                folder = Path(place) / f"{family}-{dtype}"
                save_model(family, dtype, folder)
                counts = {"isobit": engines}
                if family != "Llama":
                    counts["stock"] = engines
                found.compare(f"{family} {dtype}", folder, dtype, counts)
    return found.conclude()


class Findings:
    """Rows of a table, and sums of (compared, different) by engine."""

    def __init__(self):
        if not PYTHON.exists():
            raise SystemExit("expected .venv-vllm; run ./setup_vllm first (3.5 GB)")
        self.console = Console(highlight=False, width=170)
        self.table = Table(
            "model", "vLLM", "against each alone", "differ", "by up to", "other tokens", "counted"
        )
        self.total = {"isobit": [0, 0], "stock": [0, 0], "trainer": [0, 0]}

    def compare(self, title, folder, dtype, counts, more=()):
        """Roll out by each engine, in as many of its settings as `counts` says, and score isobit's by the trainer."""
        for engine, count in counts.items():
            found = roll_out(folder, dtype, engine, count, more)
            for axis, said in found["counts"].items():
                self.add(title, engine, axis, said, engine)
            if engine == "isobit":
                compared, different, largest = score(folder, dtype, found)
                said = {"compared": compared, "different": different, "largest": largest}
                self.add(title, engine, "the trainer's padded batches", said, "trainer")

    def add(self, title, engine, axis, said, total):
        """Add a row, and its counts to a sum."""
        tokens = f"{said['other tokens']:,} of {said['tokens']:,}" if "tokens" in said else ""
        extra = [f"{said[name]:,} {name}" for name in COUNTED if name in said]
        row = (f"{said['different']:,} of {said['compared']:,}", f"{said['largest']:.2g}", tokens)
        self.table.add_row(title, engine, axis, *row, ", ".join(extra))
        self.total[total][0] += said["compared"]
        self.total[total][1] += said["different"]

    def conclude(self):
        """Print table and sums; return 1 if isobit differs, nothing was compared, or stock never differs."""
        self.console.print(self.table)
        for name, (compared, different) in self.total.items():
            print(f"{name}: {different:,} of {compared:,} log-probabilities differ")
        ours = (*self.total["isobit"], *self.total["trainer"])
        right = ours[0] and ours[2] and not (ours[1] or ours[3]) and self.total["stock"][1]
        return int(not right)
