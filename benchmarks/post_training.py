"""Tools of post-training when only threads, batch or order change: elements whose bits differ, and one of them.

Rows of torch and isobit run everywhere, those of other packages where they are installed. All of `PACKAGES` fit into
one environment, which is not the project's: llm-compressor requires transformers 5.15 to 5.17.
"""

import argparse
import ast
import inspect
import random
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.utils import prune

from isobit import bits, distillation_loss
from isobit.calibration import (
    ColumnNorms,
    Hessian,
    gptq_statistics,
    sparsegpt_statistics,
    wanda_statistics,
)
from isobit.foundation.machine import thread_count
from isobit.library.post_training.pruning import wanda_magnitude
from isobit.library.post_training.quantising import quantize, torch_dynamic
from isobit.library.post_training.tokenizing import (
    OfFile,
    alphabet,
    count_retokenised,
    merge_by_rank,
)

PACKAGES = {  # by their names for pip; the versions that the page shows
    "torchao": "0.18.0",
    "compressed-tensors": "0.19.0",
    "trl": "1.16.0",
    "tokenizers": "0.23.3",
    "tiktoken": "0.14.0",
    "mergekit": "0.1.5",
    "llmcompressor": "0.14.0.1",
}


class Found(NamedTuple):
    """How many elements differ, of how many, and the smallest case that is known."""

    differ: int
    of: int
    first: str = ""


def differing(one, other):
    """Count the elements of two tensors whose bits differ, and show the first of them."""
    left, right = (bits.as_integers(t.contiguous()).flatten() for t in (one, other))
    apart = left != right
    if not bool(apart.any()):
        return Found(0, left.numel())
    at = int(apart.to(torch.uint8).argmax())
    values = (float(t.flatten()[at]) for t in (one, other))
    first = "element {}: {:.9g} and {:.9g}".format(at, *values)
    return Found(int(apart.sum()), left.numel(), first)


def differing_models(one, other):
    """Count the elements of two models, by name, whose bits differ; show the first tensor's first."""
    if one.keys() != other.keys():
        raise ValueError(f"tensors of one model alone: {sorted(one.keys() ^ other.keys())}")
    found = {name: differing(one[name], other[name]) for name in sorted(one)}
    first = next((f"{name}: {each.first}" for name, each in found.items() if each.differ), "")
    first = first.removeprefix("model.").replace(".weight:", ",")
    return Found(sum(f.differ for f in found.values()), sum(f.of for f in found.values()), first)


def activations():
    make = torch.Generator().manual_seed(0)
    mix = torch.randn(256, 256, generator=make) * torch.logspace(0, 2.5, 256)
    return torch.randn(32, 64, 256, generator=make) @ mix


def stock_hessian(x, batch):
    """Add as llm-compressor does: rescale what there is, then add a batch."""
    total, count = torch.zeros(256, 256), 0
    for part in x.split(batch):
        total *= count / (count + len(part))
        count += len(part)
        rows = part.reshape(-1, 256) * (2 / count) ** 0.5
        total += rows.T @ rows
    return total


def own_hessian(x, batch):
    found = Hessian(256)
    for part in x.split(batch):
        found.add(part)
    return found.value()


def on_threads(call, *threads):
    found = []
    for count in threads:
        with thread_count(count):
            found.append(call())
    return differing(*found)


def calibration():
    x = activations()
    norms = [ColumnNorms(256), ColumnNorms(256)]
    norms[0].add(x)
    for sample in x.flip(0):
        norms[1].add(sample)
    plain = x.reshape(-1, 256)
    yield (
        "torch",
        "Hessian as GPTQ adds it",
        "batch 32, 1",
        differing(stock_hessian(x, 32), stock_hessian(x, 1)),
    )
    yield (
        "isobit",
        "calibration.Hessian",
        "batch 32, 1",
        differing(own_hessian(x, 32), own_hessian(x, 1)),
    )
    yield (
        "isobit",
        "calibration.Hessian",
        "threads 1, 2",
        on_threads(lambda: own_hessian(x, 8), 1, 2),
    )
    yield (
        "torch",
        "norms of columns",
        "samples reversed",
        differing(plain.norm(dim=0), plain.flip(0).norm(dim=0)),
    )
    yield (
        "isobit",
        "calibration.ColumnNorms",
        "samples reversed",
        differing(*(n.value() for n in norms)),
    )


def distillation():
    make = torch.Generator().manual_seed(1)
    teacher, head = torch.randn(2000, 16, generator=make), torch.randn(1000, 16, generator=make)
    student = teacher + 1e-3 * torch.randn(2000, 16, generator=make)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        t, s, w = (x.to(dtype) for x in (teacher, student, head))
        p, q = (F.log_softmax(F.linear(x, w), -1) for x in (t, s))
        stock = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        ours = distillation_loss(s, w, (t, w), None, alpha=1.0, reduction="none")
        for tool, name, found in (
            ("torch", "F.kl_div", stock),
            ("isobit", "distillation_loss", ours),
        ):
            count, least = int((found < 0).sum()), int(found.argmin())
            shown = f"token {least}: {float(found[least]):.3g}" if count else ""
            varied = f"negative, {str(dtype)[6:]}"
            yield tool, name, varied, Found(count, len(found), shown)


def pruning():
    make = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 100, generator=make).bfloat16()
    for tool, name, call in (
        ("torch", "nn.utils.prune.l1_unstructured", by_torch),
        ("Wanda", "prune_magnitude of its repository", wanda_magnitude),
    ):
        zeros = int((call(weight, 0.5) == 0).sum())
        shown = f"{zeros:,} zeros, 3,200 asked" if zeros != 3200 else ""
        yield tool, name, "exact count, bf16 with ties", Found(abs(zeros - 3200), 6400, shown)


def by_torch(weight, sparsity):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    prune.l1_unstructured(layer, "weight", sparsity)
    return layer.weight.detach()


def quantising():
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    for tool, name, call in (
        ("torch", "dynamic int8, a scale per tensor", torch_dynamic),
        ("isobit", "reference, int8, a scale per row", lambda x: quantize(x, "int8")),
    ):
        whole, alone = call(x), [call(row[None]) for row in x]
        values = [(codes.double() - zero) * scale for codes, scale, zero in (whole, *alone)]
        yield tool, name, "rows alone", differing(values[0], torch.cat(values[1:]))


# ---- tools, each imported where it is installed


def torchao():
    from torchao import quantization
    from torchao.sparsity import WandaSparsifier

    def mask(batch, dtype):
        x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(5)).to(dtype)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(1000, 333, bias=False)).to(dtype)
        sparsifier = WandaSparsifier(sparsity_level=0.5)
        sparsifier.prepare(model, config=None)
        for part in x.split(batch):
            model(part)
        sparsifier.step()
        sparsifier.squash_mask()
        return (model[0].weight == 0).float()

    for dtype in (torch.float32, torch.bfloat16):
        found = differing(mask(64, dtype), mask(1, dtype))
        yield "torchao", f"WandaSparsifier, {str(dtype)[6:]}", "batch 64, 1", found
    with wanda_statistics():
        found = differing(mask(64, torch.bfloat16), mask(1, torch.bfloat16))
        yield "isobit", "the same in wanda_statistics(), bfloat16", "batch 64, 1", found

    make = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(n, 1024, generator=make).bfloat16() for n in (257, 1024))
    for name in (
        "",
        "Int8WeightOnlyConfig",
        "Int8DynamicActivationInt8WeightConfig",
        "Int8DynamicActivationIntxWeightConfig",
        "Float8WeightOnlyConfig",
    ):
        layer = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
        layer.weight.data = weight / 32
        model = torch.nn.Sequential(layer)
        if name:
            quantization.quantize_(model, getattr(quantization, name)())
        with torch.no_grad(), thread_count(2):
            found = differing(model(x), torch.cat([model(part) for part in x.split(7)]))
        tool = "torchao" if name else "torch"
        yield tool, name or "nn.Linear, bfloat16", "257 rows, 7 at a time; 2 threads", found


def compressed_tensors():
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import helpers

    x = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(7))
    x[2] *= 20
    for strategy in ("token", "tensor"):
        args = QuantizationArgs(num_bits=8, type="int", strategy=strategy, dynamic=True)

        def quantised(part, args=args):
            scale, zero = helpers.compute_dynamic_scales_and_zp(part, args, torch.nn.Linear(1, 1))
            return fake_quantize(part, scale, zero, args)

        alone = torch.cat([quantised(part) for part in x.split(1)])
        call = f"dynamic int8, a scale per {strategy}"
        yield "compressed-tensors", call, "samples alone", differing(quantised(x), alone)


def trl():
    from trl.experimental.gkd import GKDTrainer

    loss = GKDTrainer.generalized_jsd_loss

    def divergences(dtype, words, count):
        make = torch.Generator().manual_seed(8)
        teacher = 3 * torch.randn(count, words, generator=make)
        student = teacher + 1e-3 * torch.randn(count, words, generator=make)
        pairs = [
            [t.to(dtype)[None, None] for t in pair] for pair in zip(student, teacher, strict=True)
        ]
        found = torch.stack([loss(*pair, beta=0.0, reduction="sum") for pair in pairs])
        return found, pairs[int(found.argmin())]

    for dtype, words, count in (
        (torch.float32, 1000, 2000),
        (torch.bfloat16, 1000, 2000),
        (torch.float16, 1000, 2000),
        (torch.float16, 32768, 300),
    ):
        found, _ = divergences(dtype, words, count)
        first = ""
        for fewest in (n for n in range(2, words + 1) if bool((found < 0).any())):
            values, pair = divergences(dtype, fewest, 64)
            if bool((values < 0).any()):
                first = f"{fewest} words: {float(values.min()):.3g}"
                if fewest == 2:
                    shown = " and ".join(str(t.flatten().tolist()) for t in pair)
                    first += f" of logits {shown}"
                break
        call = f"generalized_jsd_loss(beta=0), {words:,} words"
        varied = f"negative, {str(dtype)[6:]}"
        yield "TRL", call, varied, Found(int((found < 0).sum()), count, first)

    student, teacher = torch.randn(2, 4, 1, 1000, generator=torch.Generator().manual_seed(9))
    norms = {}
    for temperature in (1.0, 2.0, 4.0, 8.0):
        s = student.clone().requires_grad_()
        loss(s, teacher, beta=0.0, temperature=temperature).backward()
        norms[temperature] = float(s.grad.norm())
    shown = ", ".join(f"{norm:.5f}" for norm in norms.values())
    fall = [t for t, norm in norms.items() if norm < norms[1.0] / t]
    first = f"gradient norms at T = 1, 2, 4, 8: {shown}"
    yield "TRL", "the same, without T²", "temperature 1, 2, 4, 8", Found(len(fall), 4, first)


def tokenizing():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sources = [inspect.getsource(one) for one in (argparse, ast, inspect, random, textwrap)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    letters = level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False, initial_alphabet=letters)
    made.train_from_iterator(sources, trainer)
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        file = OfFile(f"{folder}/tokenizer.json")
    drawn = random.Random(1)
    texts = [
        "".join(drawn_letter(drawn) for _ in range(drawn.randrange(60))) for _ in range(10_000)
    ]
    ids = file.encode_batch(texts)
    yield named("round trip", [file.decode(i) == t for t, i in zip(texts, ids, strict=True)], texts)
    yield named(
        "single, batch",
        [file.encode(t) == i for t, i in zip(texts[:3000], ids[:3000], strict=True)],
        texts[:3000],
    )
    words = sorted({"".join(w) for text in [*sources, *texts[:4000]] for w in file.words(text)})
    rank = {pair: i for i, pair in enumerate(file.merges)}
    same = [
        [piece.value for piece in made.model.tokenize(word)] == merge_by_rank(list(word), rank)
        for word in words
    ]
    yield named("merges by rank, words", same, words)
    changed, count = count_retokenised(file)
    yield "tokenizers", INFORMATION, "encode(decode(ids))", Found(changed, count)
    if installed("tiktoken"):
        import tiktoken

        byte_of = {letter: byte for byte, letter in enumerate(alphabet())}
        ranks = {bytes(byte_of[c] for c in piece): i for piece, i in file.vocab.items()}
        pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        other = tiktoken.Encoding("same", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        same = [other.encode_ordinary(t) == i for t, i in zip(texts, ids, strict=True)]
        yield "tiktoken", "the same merges", "ids of tokenizers", named("", same, texts)[-1]


INFORMATION = "ids of drawn words, information"
RARE = ("\u0301", "\u200d", "\ufeff", "\r\n", "\0", "\u2028", "e\u0301", "\ufb01", "\xa0", "\u3000")


def drawn_letter(drawn):
    """Return a character: mostly of programs, some of any script."""
    kind = drawn.random()
    if kind < 0.5:
        return drawn.choice("abcdefghijklmnopqrstuvwxyz ()_=.:\n\t'\"0123456789")
    if kind < 0.8:
        ranges = ((0x20, 0x7F), (0xA0, 0x2000), (0x2000, 0xD7FF))
        return chr(drawn.randrange(*drawn.choice(ranges)))
    return chr(drawn.randrange(0x10000, 0x1FFFF)) if kind < 0.95 else drawn.choice(RARE)


def named(varied, same, texts):
    """Return a row of tokenizers; the counter-example is the shortest text."""
    wrong = [text for text, equal in zip(texts, same, strict=True) if not equal]
    shown = repr(min(wrong, key=len)) if wrong else ""
    return "tokenizers", "byte-level BPE, 2,000 pieces", varied, Found(len(wrong), len(same), shown)


def llama(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads)).to(dtype).eval()


def write_models(folder):
    """Write a base and three models near it, each whole and in shards."""
    for seed, name in enumerate(("base", "a", "b", "c")):
        model, make = llama(torch.bfloat16), torch.Generator().manual_seed(seed)
        for weight in model.parameters() if seed else ():
            weight.data += (0.01 * torch.randn(weight.shape, generator=make)).bfloat16()
        model.save_pretrained(f"{folder}/{name}")
        model.save_pretrained(f"{folder}/{name}-sharded", max_shard_size="300KB")


def merge(folder, out, method, names="abc", suffix="", threads=1, **options):
    """Merge the models of `write_models` by mergekit."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    weights = {"a": 0.3, "b": 0.4, "c": 0.5}
    models = [
        {"model": f"{folder}/{n}{suffix}", "parameters": {"weight": weights[n], "density": 0.53}}
        for n in names
    ]
    config = {"merge_method": method, "dtype": "bfloat16", "models": models, **options}
    if method != "linear":
        config["base_model"] = f"{folder}/base{suffix}"
    how = MergeOptions(copy_tokenizer=False, random_seed=7, quiet=True)
    with thread_count(threads):
        run_merge(MergeConfiguration.model_validate(config), out_path=str(out), options=how)


def merged(folder, method, **options):
    """Return the weights that mergekit makes."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as out:
        merge(folder, out, method, **options)
        files = sorted(Path(out).glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mergekit():
    """Yield (method, what is varied, what was found) of merges of three models in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        write_models(folder)
        for method in (
            *("dare_ties", "dare_linear", "della", "model_stock"),
            *("breadcrumbs", "sce", "task_arithmetic", "ties"),
        ):
            of_method = partial(merged, folder, method)
            one = of_method()
            yield method, "again", differing_models(one, of_method())
            yield method, "threads 1, 2", differing_models(one, of_method(threads=2))
            yield method, "sharded input", differing_models(one, of_method(suffix="-sharded"))
            yield method, "order of models", differing_models(one, of_method(names="cab"))
            inside = of_method(dtype="float32", out_dtype="bfloat16")
            yield method, "dtype: float32", differing_models(one, inside)


def smallest_merge():
    """Find the fewest weights whose factor of DARE differs between thread counts."""
    from mergekit.sparsify import RescaleNorm, SparsificationMethod, sparsify

    delta = 0.01 * torch.randn(2**17, generator=torch.Generator().manual_seed(1))
    how = {"method": SparsificationMethod.random, "rescale_norm": RescaleNorm.l1}
    for count in range(2**15, len(delta)):
        part, both = delta[:count].bfloat16(), []
        for threads in (1, 2):
            torch.manual_seed(7)
            with thread_count(threads):
                both.append(sparsify(part, density=0.53, **how))
        found = differing(*both)
        if found.differ:
            kept = both[0] != 0
            factors = [float((one[kept] / part[kept]).double().median()) for one in both]
            exact = float(part.double().abs().sum() / part[kept].double().abs().sum())
            first = "factor {:.5f} and {:.5f}, exactly {:.5f}".format(*factors, exact)
            yield (
                "mergekit",
                f"sparsify of {count:,} weights, bf16",
                "threads 1, 2",
                Found(found.differ, count, first),
            )
            return
    yield "mergekit", "sparsify, bf16", "threads 1, 2", Found(0, len(delta))


def recipes():
    """Return modifiers of llm-compressor by name, each with isobit's statistics for it."""
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from llmcompressor.modifiers.quantization import GPTQModifier

    layers = {"targets": ["LlamaDecoderLayer"], "sparsity": 0.5}
    gptq = partial(GPTQModifier, targets="Linear", scheme="W4A16", ignore=["lm_head"])
    return {
        "GPTQ W4A16": (gptq, gptq_statistics),
        "SparseGPT 0.5": (partial(SparseGPTModifier, **layers), sparsegpt_statistics),
        "Wanda 0.5": (partial(WandaPruningModifier, **layers), None),
        'Wanda 0.5, targets="Linear"': (
            partial(WandaPruningModifier, sparsity=0.5, targets="Linear"),
            None,
        ),
    }


def llm_compressor():
    """Yield (call, what is varied, what was found) of recipes of llm-compressor, on 32 samples of 64 tokens."""
    from compressed_tensors.utils import match_named_modules

    for call, (modifier, adapter) in recipes().items():
        one = compressed(modifier)
        yield call, "again", differing_models(one, compressed(modifier))
        yield call, "threads 1, 2", differing_models(one, compressed(modifier, threads=2))
        yield call, "batch 1, 8", differing_models(one, compressed(modifier, batch=8))
        yield call, "samples shuffled", differing_models(one, compressed(modifier, shuffled=True))
        if not call.startswith("GPTQ"):
            found = zeros(one)
            if '"Linear"' in call:
                model = llama(torch.float32)
                counts = [
                    len(list(match_named_modules(model, one))) for one in ("Linear", ["Linear"])
                ]
                shown = 'no error; match_named_modules: {} modules of "Linear", {} of ["Linear"]'
                found = found._replace(first=shown.format(*counts))
            yield call, "zeros asked", found
        if adapter is None:
            continue
        # Samples are not shuffled: a Hessian is a tree over samples in their order.
        call = f"isobit: {call} in {adapter.__name__}()"
        with adapter():
            one = compressed(modifier)
            yield call, "again", differing_models(one, compressed(modifier))
            yield call, "threads 1, 2", differing_models(one, compressed(modifier, threads=2))
            yield call, "batch 1, 8", differing_models(one, compressed(modifier, batch=8))


def zeros(weights):
    """Count the zeros that are too many or too few for half of all weights."""
    of = sum(w.numel() for w in weights.values())
    made = sum(int((w == 0).sum()) for w in weights.values())
    return Found(abs(made - of // 2), of, f"{made:,} zeros, {of // 2:,} asked")


def compressed(modifier, batch=1, threads=1, shuffled=False):
    """Return the weights of linear layers that llm-compressor makes."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t1", eos_token="t2")
    ids = torch.randint(0, 512, (32, 64), generator=torch.Generator().manual_seed(3))
    if shuffled:
        ids = ids[torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    rows = [{"input_ids": row, "attention_mask": [1] * 64} for row in ids.tolist()]
    with tempfile.TemporaryDirectory() as folder, thread_count(threads):
        llama(torch.float32).save_pretrained(folder)  # oneshot reads the configuration again
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=Dataset.from_list(rows),
            recipe=[modifier()],
            max_seq_length=64,
            num_calibration_samples=32,
            shuffle_calibration_samples=False,
            batch_size=batch,
        )
    return {n: w.clone() for n, w in model.state_dict().items() if n.endswith("proj.weight")}


def speed(tokens=256, width=1024, words=151_936):
    """Return lines: CPU seconds of a distillation step on one thread, next to logits and F.kl_div."""
    make = torch.Generator().manual_seed(10)
    teacher, student = (torch.randn(tokens, width, generator=make) for _ in range(2))
    head = 0.02 * torch.randn(words, width, generator=make)

    def stock(s, t, w):
        p, q = (F.log_softmax(F.linear(x, w).float(), -1) for x in (t.detach(), s))
        return F.kl_div(q, p.detach(), log_target=True, reduction="batchmean")

    def ours(s, t, w):
        return distillation_loss(s, w, (t, w.detach()), None, alpha=1.0)

    for dtype in (torch.float32, torch.bfloat16):
        t, s, w = (x.to(dtype) for x in (teacher, student, head))
        taken = {stock: [], ours: []}
        for step in [stock, ours] * 3:
            leaves = [x.clone().requires_grad_() for x in (s, w)]
            started = time.process_time()
            step(leaves[0], t, leaves[1]).backward()
            taken[step].append(time.process_time() - started)
        least = [min(times) for times in taken.values()]
        yield (
            f"forward and backward, {tokens} tokens, width {width:,}, {words:,} words, {str(dtype)[6:]}:"
            f" F.kl_div {least[0]:.1f}, distillation_loss {least[1]:.1f} CPU s; stock / isobit"
            f" {least[0] / least[1]:.2f}"
        )


# ---- the tables

EVERYWHERE = (calibration, distillation, pruning, quantising)
ROWS = {
    "torchao": torchao,
    "compressed-tensors": compressed_tensors,
    "trl": trl,
    "tokenizers": tokenizing,
    "mergekit": smallest_merge,
}
TABLES = {"mergekit": mergekit, "llmcompressor": llm_compressor}  # a row per call


def installed(package):
    """Return the version of a package, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@contextmanager
def quietly():
    """Send what tools print to stderr, so that a record has the tables alone."""
    with redirect_stdout(sys.stderr):
        yield


def add_calls(tool, rows):
    """Return a table with a row per call and a column per thing that is varied."""
    columns = list(dict.fromkeys(varied for _, varied, _ in rows))
    table = Table(tool, *columns, "of", "the first")
    for call in dict.fromkeys(row[0] for row in rows):
        found = {varied: one for name, varied, one in rows if name == call}
        cells = [f"{found[c].differ:,}" if c in found else "" for c in columns]
        first = next((one.first for one in found.values() if one.differ), "")
        table.add_row(call, *cells, f"{max(one.of for one in found.values()):,}", first)
    return table


def run(quick, threads, dtypes):
    """Print the tables; the exit code is 1 if a row of isobit's differs, or nothing of stock's does."""
    console = Console(highlight=False, markup=False, width=260)  # no cell is wrapped
    table = Table("tool", "call", "varied", "differ", "of", "the first")
    ours, stock = [], []
    with quietly(), thread_count(1):
        cases = [*EVERYWHERE, *(case for name, case in ROWS.items() if installed(name))]
        rows = [row for case in cases for row in case()]
    for tool, call, varied, found in rows:
        table.add_row(tool, call, varied, f"{found.differ:,}", f"{found.of:,}", found.first)
        (ours if tool == "isobit" else stock).append(found)
    console.print(table)
    for name, case in TABLES.items():
        if installed(name) and not quick:
            with quietly(), thread_count(1):
                rows = list(case())
            console.print(add_calls(f"{name} {installed(name)}", rows))
            for call, _, found in rows:
                (ours if call.startswith("isobit") else stock).append(found)
    console.print(
        f"isobit: {sum(bool(f.differ) for f in ours)} of {len(ours)} differ; others:"
        f" {sum(bool(f.differ) for f in stock)} of {len(stock)}"
    )
    if not quick:
        with thread_count(1):
            for line in speed():
                console.print(line)
    present = [f"{name} {installed(name)}" for name in ("transformers", *PACKAGES)]
    console.print(", ".join(one for one in present if not one.endswith(" ")))
    missing = [f"{name}=={of}" for name, of in PACKAGES.items() if not installed(name)]
    if missing:
        console.print(f"left out; pip install {' '.join(missing)}", soft_wrap=True)
    return int(any(f.differ for f in ours) or not any(f.differ for f in stock))
