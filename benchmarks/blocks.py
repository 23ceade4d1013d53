"""A block of experts and a layer of linear attention against transformers' own: forward, and forward + backward.

Nothing is timed before a sample's output is the same alone and in the batch, and near stock's. Contenders take turns; a
ratio is stock time / isobit's time of one round, and the table has the quartiles and the median of all rounds. Where
stock's own quartiles are more than 15 % apart, the case is timed again, up to three times.
"""

import copy
import statistics

import torch
import transformers
from rich.console import Console
from rich.table import Table

import isobit
from benchmarks.adamw import alternate
from benchmarks.ratios import Ratio
from isobit import bits
from isobit.foundation.machine import thread_count
from isobit.integrations.transformers.layout import in_force, read_layout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
}
LINEAR = {
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 128,
}
# By name: the class of the model, its other sizes, and the block of its first layer.
BLOCKS = {
    "experts": ("Qwen3Moe", {}, "mlp"),
    "linear attention": ("Qwen3Next", LINEAR, "linear_attn"),
}
SHAPES = ((4, 128), (8, 1))  # samples × tokens
SPREAD, TRIES = 0.15, 3  # of stock's quartiles
FAR = {"float32": 1e-4, "bfloat16": 0.05}  # of the largest element


def run(quick, threads, dtypes):
    console = Console(highlight=False, width=150)
    table = Table(
        *("threads", "dtype", "block", "samples × tokens", "call", "stock ms", "stock spread"),
        *("ratio: quartiles", "median", "of CPU time"),
    )
    compared = 0
    for dtype in dtypes:
        for name in BLOCKS:
            models = build(name, getattr(torch, dtype))
            for shape in SHAPES:
                compared += compare(models, name, shape, dtype)
                for count in threads:
                    with thread_count(count):
                        for call in ("forward", "fwd+bwd"):
                            found = time_case(models, name, shape, call, 7 if quick else 15)
                            where = (str(count), dtype, name, f"{shape[0]} × {shape[1]}", call)
                            table.add_row(*where, *found)
    console.print(table)
    used = build("experts", torch.float32)["stock"].config._experts_implementation
    console.print(
        f"0 of {compared:,} values differ alone and in the batch; stock's experts: {used}"
    )
    return 0


def build(name, dtype):
    """Return a model as transformers computes it, and a copy that is enabled."""
    family, more, _ = BLOCKS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    stock = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    return {"stock": stock, "ours": isobit.enable(copy.deepcopy(stock))}


def block_of(models, who, name):
    """Return a function of hidden states: the block of the first layer."""
    block = getattr(models[who].model.layers[0], BLOCKS[name][2])
    if who == "stock":
        return lambda x: first_of(block(x))

    def ours(x):
        with in_force(read_layout(x.shape[:2])):
            return first_of(block(x))

    return ours


def first_of(found):
    return found[0] if isinstance(found, tuple) else found


def draw(shape, dtype):
    torch.manual_seed(1)
    return torch.randn(*shape, SIZES["hidden_size"]).to(dtype)


@torch.no_grad()
def compare(models, name, shape, dtype):
    """Return how many values were compared; raise if one differs alone and in the batch, or is far from stock's."""
    x = draw(shape, getattr(torch, dtype))
    ours, stock = (block_of(models, who, name) for who in ("ours", "stock"))
    whole = ours(x)
    if not bits.equal(whole[:1], ours(x[:1])):
        raise SystemExit(f"{name}, {dtype}, {shape}: a sample differs alone and in the batch")
    expected = stock(x).float()
    far = (whole.float() - expected).abs().amax(-1) > FAR[dtype] * expected.abs().max()
    if far.float().mean() > 0.02:  # in bf16 a route may fall otherwise than stock's
        raise SystemExit(f"{name}, {dtype}, {shape}: {int(far.sum())} rows are far from stock's")
    return whole[:1].numel()


def time_case(models, name, shape, call, rounds):
    """Return cells: stock's milliseconds and spread, quartiles and median of the ratio, and that of CPU time."""
    dtype = next(models["stock"].parameters()).dtype
    x, grad = draw(shape, dtype), draw(shape, dtype)

    def contend(who):
        block = block_of(models, who, name)
        parameters = list(getattr(models[who].model.layers[0], BLOCKS[name][2]).parameters())
        given = x.clone().requires_grad_()

        def forward():
            with torch.inference_mode():
                block(x)

        def step():
            torch.autograd.grad(block(given), [given, *parameters], grad, allow_unused=True)

        return forward if call == "forward" else step

    contenders = {who: contend(who) for who in ("stock", "ours")}
    for _ in range(TRIES):
        times = alternate(contenders, rounds)
        low, middle, high = statistics.quantiles([wall for wall, _ in times["stock"]], n=4)
        spread = (high - low) / middle
        if spread <= SPREAD:
            break
    wall, cpu = (
        Ratio.of(*([one[clock] for one in times[who]] for who in ("stock", "ours")))
        for clock in (0, 1)
    )
    shown, quartiles = wall.cells()
    return (
        f"{middle * 1e3:.2f}",
        f"{spread:.0%}",
        quartiles,
        shown,
        f"{cpu.median:.2f}",
    )
