"""Clean models: of isobit's operators or exact, with rows viewed, moved, sorted and written in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from isobit.gates.model.models import build_model
from isobit.integrations.transformers.enabling import enable
from isobit.library.audit.plants.cached import CausalNet, tokens
from isobit.library.audit.plants.plant import (
    WIDTH,
    Dense,
    Inputs,
    draw,
    hidden,
    padded_hidden,
)
from isobit.ops.attention.op import attention
from isobit.ops.gelu.op import gelu
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.linear.op import linear
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.softmax.op import softmax
from isobit.ops.swiglu.op import swiglu
from isobit.order.samples import Samples

HEADS, EXPERTS = 2, 4
DEPTH = WIDTH // HEADS


@dataclass(frozen=True)
class CleanModel:
    """A model without a guilty operator.

    Attributes:
        name: what it is.
        build: returns the model and its inputs; samples are along axis 0.
        axes: the axes along which no bit may change.
        backward: whether its gradients are clean too.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    axes: tuple[str, ...] = ("batch", "repeat", "threads")
    backward: bool = True


class Weights(nn.Module):
    """A module with named parameters, drawn at their shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for at, (name, shape) in enumerate(shapes.items()):
            drawn = draw(*shape, seed=50 + at, spread=1) * shape[-1] ** -0.5
            self.register_parameter(name, nn.Parameter(drawn))
        self.eval()

    def freeze(self, *names: str) -> None:
        """Take parameters out of training: torch adds their gradients over samples in an order of its own."""
        for name in names:
            self.get_parameter(name).requires_grad_(False)


class Perceptron(nn.Module):
    """Linear layers with elementwise operators between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(seed=seed) for seed in (60, 61, 62)])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.where(x > 0, x, x * 0.25) + layer(x).clamp(-8.0, 8.0)
        return x


class PackedAttention(Weights):
    """Attention over all samples packed into one row of tokens."""

    qkv: Tensor
    out: Tensor

    def __init__(self) -> None:
        super().__init__(qkv=(3 * WIDTH, WIDTH), out=(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        samples = Samples.packed([x.shape[1]] * len(x))
        rows = linear(x, self.qkv).view(-1, 3, HEADS, DEPTH)
        q, k, v = rows.unbind(1)
        y = attention(q, k, v, is_causal=True, q_samples=samples, k_samples=samples)
        return x + linear(y.reshape(x.shape), self.out)


class Experts(Weights):
    """A mixture of experts: tokens sorted by expert, one product per expert, and sorted back."""

    router: Tensor
    up: Tensor

    def __init__(self) -> None:
        super().__init__(router=(EXPERTS, WIDTH), up=(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = softmax(linear(flat, self.router))
        weight, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
        parts = torch.split(flat[order], counts)
        done = [linear(part, up) for part, up in zip(parts, self.up.unbind(), strict=True)]
        y = torch.empty_like(flat).index_copy(0, order, torch.cat(done))
        return x + (y * weight[:, None]).view(x.shape)


class MovedRows(Weights):
    """Rows that are viewed, permuted, sorted by a key and put back."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__(weight=(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        key, order = x[:, 0, 0].sort(descending=True)
        y = x.index_select(0, order) * key[:, None, None]
        y = y.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        y = linear(y.flip(1).reshape(-1, WIDTH), self.weight).view(x.shape).flip(1)
        back = order.argsort()
        y = y.gather(0, back[:, None, None].expand(x.shape))
        return torch.cat([x[:, 1:], y[:, -1:]], 1) + y


class TimeMajor(Weights):
    """A recurrent model over [T, B, H]."""

    inner: Tensor
    outer: Tensor

    def __init__(self) -> None:
        super().__init__(inner=(WIDTH, WIDTH), outer=(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        steps = x.transpose(0, 1)
        state = torch.zeros_like(steps[0])
        states = []
        for step in steps:
            state = (linear(step, self.inner) + linear(state, self.outer)).clamp(-4, 4)
            states.append(state)
        return torch.stack(states).transpose(0, 1)


class InPlace(Weights):
    """Operators that write into their arguments, and into parts of them."""

    weight: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(weight=(WIDTH, WIDTH), scale=(WIDTH,))
        self.freeze("scale")

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight)
        z = y.clone().mul_(self.scale).add_(x)
        z[:, 1:] -= y[:, :-1]
        z[:, 0].clamp_(-1.0, 1.0)
        return z.masked_fill_(z > 6.0, 6.0)


class Patches(Weights):
    """A small vision transformer: patches, a class token, bidirectional attention, GELU."""

    patch: Tensor
    first: Tensor
    places: Tensor
    gain: Tensor
    second: Tensor
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    head: Tensor

    def __init__(self) -> None:
        super().__init__(
            patch=(WIDTH, 3 * 16),
            first=(1, 1, WIDTH),
            places=(1, 5, WIDTH),
            gain=(WIDTH,),
            second=(WIDTH,),
            qkv=(3 * WIDTH, WIDTH),
            out=(WIDTH, WIDTH),
            up=(2 * WIDTH, WIDTH),
            down=(WIDTH, 2 * WIDTH),
            head=(10, WIDTH),
        )
        self.freeze("first", "places")

    def forward(self, pixels: Tensor) -> Tensor:
        cut = pixels.unfold(2, 4, 4).unfold(3, 4, 4)  # [B, 3, 2, 2, 4, 4]
        x = linear(cut.permute(0, 2, 3, 1, 4, 5).reshape(len(pixels), 4, -1), self.patch)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        rows = linear(layer_norm(x, self.gain), self.qkv)
        q, k, v = rows.view(len(x), -1, 3, HEADS, DEPTH).unbind(2)
        x = x + linear(attention(q, k, v, is_causal=False).flatten(2), self.out)
        y = gelu(linear(layer_norm(x, self.second), self.up))
        return linear((x + linear(y, self.down))[:, :1], self.head)


class MaskedNorms(Weights):
    """Norms and products of padded rows; padding is set to zero by the mask."""

    gain: Tensor
    gate: Tensor
    up: Tensor

    def __init__(self) -> None:
        super().__init__(gain=(WIDTH,), gate=(WIDTH, WIDTH), up=(WIDTH, WIDTH))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        y = rms_norm(x, self.gain)
        y = swiglu(linear(y, self.gate), linear(y, self.up))
        return (x + y) * attention_mask[..., None]


def text(vocabulary: int, lengths: tuple[int, ...] = (11, 8, 9, 6)) -> Inputs:
    """Return random ids, padded on the right, with their mask."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def enabled(name: str) -> tuple[nn.Module, Inputs]:
    """Return a model of transformers with isobit's operators."""
    model = build_model(name, torch.float32)
    return enable(model), text(model.config.vocab_size)


def with_inputs(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs] = hidden
) -> tuple[nn.Module, Inputs]:
    """Build a model and its inputs."""
    return make(), inputs()


def pixels() -> Inputs:
    """Return images [samples, 3, 8, 8]."""
    return {"pixels": draw(5, 3, 8, 8, seed=8, spread=1)}


TEXT_AXES = ("batch", "padding", "decode", "chunks", "repeat", "threads")
MODELS: tuple[CleanModel, ...] = (
    *(
        CleanModel(name, partial(enabled, name), TEXT_AXES)
        for name in ("qwen3-tiny", "qwen2-tiny", "llama-tiny")
    ),
    CleanModel("perceptron", partial(with_inputs, Perceptron)),
    CleanModel("packed attention", partial(with_inputs, PackedAttention)),
    CleanModel("sorted experts", partial(with_inputs, Experts), backward=False),
    CleanModel("moved rows", partial(with_inputs, MovedRows), backward=False),
    # Its weights are used at every step, so that gradients are added over steps before samples.
    CleanModel("time-major", partial(with_inputs, TimeMajor), backward=False),
    CleanModel("in place", partial(with_inputs, InPlace)),
    CleanModel("vision", partial(with_inputs, Patches, pixels)),
    CleanModel(
        "masked norms",
        partial(with_inputs, MaskedNorms, padded_hidden),
        ("batch", "padding", "repeat", "threads"),
    ),
    CleanModel(
        "cached", partial(with_inputs, CausalNet, tokens), ("batch", "decode", "chunks", "repeat")
    ),
)
