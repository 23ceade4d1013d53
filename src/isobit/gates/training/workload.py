"""The workloads of the rank-layout gate: a Qwen3 or Qwen3-MoE model and samples of unequal lengths."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.comparing.checkpoints.weight_digests import accept_rounded_frequencies
from isobit.errors import ArgumentError, CutError
from isobit.gates.model.models import spread_weights
from isobit.integrations.transformers.package import library
from isobit.ops.logprob.op import IGNORED
from isobit.order.plan import FeaturePlan
from isobit.parallel.data.global_batch import GlobalBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """A training run, independent of its layout."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    samples: int  # per global batch
    steps: int
    shortest: int = 4  # sample, in tokens
    longest: int = 12
    head_dim: int = 64
    rate: float = 1e-3  # learning rate of AdamW
    clip: float = 1.0  # largest gradient norm
    seed: int = 0
    experts: int = 0  # of each layer; 0 is a dense model
    chosen: int = 0  # experts of each token

    @property
    def config(self) -> Any:
        """The configuration of the model for transformers."""
        mixture = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.ffn,
            "norm_topk_prob": True,
        }
        kind = library().Qwen3MoeConfig if self.experts else library().Qwen3Config
        return kind(
            **(mixture if self.experts else {}),
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            head_dim=self.head_dim,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            use_cache=False,
        )


WORKLOADS = {
    "tiny": Workload("tiny", 512, 512, 8, 4, 1, 512, samples=8, steps=2),
    "whole": Workload("whole", 1024, 4096, 16, 8, 4, 8192, samples=16, steps=10),
    "small": Workload("small", 1024, 1024, 16, 8, 1, 1024, samples=16, steps=3),
    # Samples of up to three blocks of keys, so that ranks that share attention have keys of each other.
    "moe": Workload(
        "moe", 128, 64, 4, 2, 2, 256, 8, 2, longest=150, head_dim=32, experts=8, chosen=2
    ),
}


def find_workload(name: str) -> Workload:
    """Return a workload by name.

    Raises:
        ArgumentError: There is no such workload.
    """
    if name not in WORKLOADS:
        raise ArgumentError(
            expected=f"one of {', '.join(WORKLOADS)}",
            received=repr(name),
            remedy="pass one of these names",
        )
    return WORKLOADS[name]


def find_dtype(name: str) -> torch.dtype:
    """Return a dtype by name.

    Raises:
        ArgumentError: It is not supported here.
    """
    if name not in DTYPES:
        raise ArgumentError(
            expected=f"one of {', '.join(DTYPES)}",
            received=repr(name),
            remedy="pass one of these names",
        )
    return DTYPES[name]


def make_model(workload: Workload, dtype: torch.dtype) -> Any:
    """Return a new model with the initial weights, which are the same on every rank."""
    return copy.deepcopy(_first_model(workload, dtype))


@lru_cache(maxsize=1)
def _first_model(workload: Workload, dtype: torch.dtype) -> Any:
    # Simulated ranks build their models one after another: 80 million weights are drawn only once.
    with torch.random.fork_rng():
        torch.manual_seed(workload.seed)
        kind = library().Qwen3MoeForCausalLM if workload.experts else library().Qwen3ForCausalLM
        model = kind(workload.config)
        spread_weights(model, workload.seed)
    accept_rounded_frequencies(model.to(dtype))  # no checkpoint is compared with this model
    return model.train()


@dataclass(frozen=True)
class Rows:
    """The right-padded samples of a rank's micro-batch."""

    ids: Tensor  # [B, T]
    mask: Tensor  # [B, T], 1 for tokens, 0 for padding
    targets: Tensor  # [B, T], the next token of the sample, -100 if there is none

    @property
    def active(self) -> int:
        """The number of tokens that have a loss."""
        return int((self.targets != IGNORED).sum())


def draw_samples(workload: Workload, step: int) -> list[Tensor]:
    """Draw the samples of a step's global batch; every rank draws the same."""
    generator = torch.Generator().manual_seed(workload.seed * 1_000_003 + step)
    span = workload.longest - workload.shortest + 1
    lengths = workload.shortest + torch.randint(0, span, (workload.samples,), generator=generator)
    return [torch.randint(0, workload.vocabulary, (int(n),), generator=generator) for n in lengths]


def active_tokens(samples: list[Tensor]) -> int:
    """Return the number of tokens that have a loss: all but the first of each sample."""
    return sum(len(sample) - 1 for sample in samples)


def lay_out(samples: list[Tensor]) -> Rows:
    """Pad samples to the longest one, one row per sample."""
    width = max(len(sample) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, sample in enumerate(samples):
        length = len(sample)
        ids[row, :length], mask[row, :length] = sample, 1
        targets[row, : length - 1] = sample[1:]
    return Rows(ids, mask, targets)


# Rank layouts: data-parallel ranks × micro-batches × tensor-parallel ranks, and the wrapper. Of a mixture of experts
# also how many of the data-parallel ranks split the experts, and how many ranks share the attention of a sequence.

ENGINES = ("isobit", "ddp", "fsdp2")
MOST_RANKS = 32
# (data, micro, tensor, experts, context) of a workload with experts, without a wrapper
MIXTURES = (
    (1, 1, 1, 1, 1),
    (1, 4, 1, 1, 1),
    (4, 2, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 4, 1, 2, 1),
    (4, 2, 1, 2, 1),
    (4, 1, 1, 4, 1),
    (8, 1, 1, 8, 1),
    (1, 1, 1, 1, 2),
    (1, 2, 1, 1, 4),
    (2, 2, 1, 2, 2),
    (4, 1, 1, 4, 2),
)
WRAPPED = ((2, 1), (2, 4), (4, 2), (8, 1))  # (data, micro) of DDP and FSDP2, besides the grid


@dataclass(frozen=True, order=True)
class RankLayout:
    """One way to spread a global batch over `data` × `tensor` ranks."""

    data: int = 1  # data-parallel ranks
    micro: int = 1  # micro-batches per rank and step
    tensor: int = 1  # tensor-parallel ranks
    engine: str = "isobit"  # "isobit" is the plain model; otherwise the wrapper
    experts: int = 1  # data-parallel ranks over which experts are split
    context: int = 1  # ranks that share the attention of their sequences

    def __post_init__(self) -> None:
        """Check the wrapper."""
        if self.data % self.experts or (self.experts > 1 and self.tensor > 1):
            raise CutError(
                expected="experts that are split over some or all data-parallel ranks, without tensor parallelism",
                received=f"{self.experts} of {self.data} ranks, {self.tensor} tensor-parallel ones",
                remedy="choose a number that divides the data-parallel ranks",
            )
        if self.engine not in ENGINES:
            raise ArgumentError(
                expected=f"one of {', '.join(ENGINES)}",
                received=repr(self.engine),
                remedy="pass one of these",
            )
        inside = self.tensor * self.experts * self.context
        if self.engine != "isobit" and (inside > 1 or self.data == 1):
            raise CutError(
                expected=f"{self.engine} over two data-parallel ranks or more, without "
                "tensor, expert or context parallelism",
                received=str(self),
                remedy="use the engine 'isobit' for these, and for one rank",
            )

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.data * self.tensor * self.context

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The shape and the axes of a device mesh: `data` ranks have the same experts."""
        shape = (self.data // self.experts, self.experts, self.context, self.tensor)
        return shape, ("data", "experts", "context", "tensor")

    @property
    def sizes(self) -> str:
        """A name such as "2×2×1" (data × micro × tensor), or "4×2×1 ep2 cp2"."""
        found = f"{self.data}×{self.micro}×{self.tensor}"
        found += f" ep{self.experts}" if self.experts > 1 else ""
        return found + (f" cp{self.context}" if self.context > 1 else "")

    def __str__(self) -> str:
        """Return a name such as "ddp 2×2×1"."""
        return f"{self.engine} {self.sizes}"

    def of(self, side: str) -> str:
        """Return a name with the side that was trained, such as "stock ddp 2×2×1" or "stock 2×2×1"."""
        return f"{side} {self.sizes if self.engine == 'isobit' else self}"


def layout_grid(
    workload: Workload, data: int = 8, micro: int = 8, tensor: int = 4
) -> list[RankLayout]:
    """Return every layout of powers of two that the samples, the model and 32 ranks allow.

    Layouts of DDP and FSDP2 follow at the end. A workload with experts has a list of its own.
    """
    if workload.experts:
        chosen = [RankLayout(d, m, t, "isobit", e, c) for d, m, t, e, c in MIXTURES]
        return [*chosen, RankLayout(2, 4, 1, "ddp"), RankLayout(2, 4, 1, "fsdp2")]
    powers = [[1 << i for i in range(most.bit_length())] for most in (data, micro, tensor)]
    found = [
        RankLayout(d, m, t)
        for d, m, t in itertools.product(*powers)
        if d * m <= workload.samples and d * t <= MOST_RANKS and t <= widest_tensor(workload)
    ]
    wrapped = [(d, m) for d, m in WRAPPED if d <= data and m <= micro and d * m <= workload.samples]
    return found + [RankLayout(d, m, 1, engine) for engine in ENGINES[1:] for d, m in wrapped]


def check_layout(layout: RankLayout, workload: Workload) -> None:
    """Check, before training, that the samples and the model can be divided like this.

    Raises:
        CutError: They cannot.
    """
    GlobalBatch(workload.samples, layout.data, layout.micro)
    if layout.experts > 1 and (not workload.experts or workload.experts % layout.experts):
        raise CutError(
            expected=f"ranks that divide the {workload.experts} experts of the workload {workload.name}",
            received=str(layout),
            remedy="choose fewer, or --workload moe",
        )
    widest = 1 if workload.experts else widest_tensor(workload)
    if layout.tensor not in [1 << i for i in range(widest.bit_length())]:
        raise CutError(
            expected=f"a power of two of tensor-parallel ranks, at most {widest}",
            received=str(layout),
            remedy="choose fewer, or a wider workload",
        )


def widest_tensor(workload: Workload) -> int:
    """Return the largest number of tensor-parallel ranks that every split axis allows."""
    wide = workload.heads * workload.head_dim
    joined = wide + 2 * workload.kv_heads * workload.head_dim
    extents = (wide, joined, workload.ffn, 2 * workload.ffn, workload.vocabulary)
    return min(workload.kv_heads, *(FeaturePlan(extent).count for extent in extents))
