"""The launches of every Triton executor, taken from real calls of the operators; nothing is run.

Sizes are those of models, so tensors are uninitialised memory, which costs nothing until it is read.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import torch

import isobit
from isobit.certifying.running.compile import Specialised, specialise
from isobit.foundation import backends
from isobit.order.engines import ENGINE_OF_TARGET

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Model:
    """The sizes of a model that kernels see."""

    name: str
    hidden: int
    middle: int
    heads: int
    key_heads: int
    depth: int
    words: int = 8192  # of the vocabulary: a part, so that gradients of it fit into memory
    experts: int = 0  # of which a token chooses `chosen`; `middle` is that of one expert
    chosen: int = 0


LARGE = Model("Qwen3-8B", 4096, 12288, 32, 8, 128)
SMALL = Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128)
MIXTURE = Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, experts=128, chosen=8)
ROW_COUNTS = (1, 2, 3, 8, 17, 64, 100, 512)  # every form, also of eight queries for a head of keys


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, specialised for a target."""

    operator: str
    kernel: object
    call: Specialised
    grid: tuple

    @property
    def name(self):
        """Return the kernel's name; two folders may have kernels of one name."""
        return self.kernel.__name__

    @property
    def key(self):
        """Return what makes two launches use one binary."""
        return (self.kernel.fn.__module__, self.name, *self.call.key)

    @property
    def written(self):
        """Return the same without what Triton adds by the values of arguments: 1, None, and multiples of 16."""
        written = {p.name for p in self.kernel.params if p.is_constexpr}
        constants = {name: value for name, value in self.constants.items() if name in written}
        types = [kind for kind in self.call.signature.values() if kind.startswith("*")]
        return (
            self.kernel.fn.__module__,
            self.name,
            str(constants),
            str(types),
            str(self.call.options),
        )

    @property
    def constants(self):
        """Return constants by name."""
        names = list(self.call.signature)
        return {names[path[0]]: value for path, value in self.call.constants.items()}


@dataclass
class Recording:
    """A backend that keeps launches and runs nothing."""

    target: str
    operator: str = ""
    launches: list = field(default_factory=list)

    @property
    def engine(self):
        """Return the arithmetic of the target's matrix products; nothing is computed here."""
        return ENGINE_OF_TARGET.get(self.target, "")

    def launch(self, kernel, grid, args, constants, options):
        """Keep one launch, without its tensors."""
        call = specialise(kernel, self.target, args, {**constants, **options})
        call.bound.clear()
        self.launches.append(Launch(self.operator, kernel, call, grid))


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def both_ways(function, *tensors):
    """Call an operator and its gradient."""
    y = function(*tensors)
    torch.autograd.grad(y, [t for t in tensors if t.requires_grad], torch.empty_like(y))


def packed(rows):
    """Return samples of a batch with as many rows: two, or one."""
    return isobit.Samples.packed([rows - rows // 2, rows // 2] if rows > 1 else [rows])


def row_operators(model, rows, dtype):
    """Yield (operator, call) of norms, softmax and functions of elements."""
    wide, samples = (rows, model.hidden), packed(rows)
    weight, bias = (empty(model.hidden, dtype=dtype) for _ in range(2))

    def run(function, *tensors, **named):
        return lambda: both_ways(lambda *given: function(*given, **named), *tensors)

    x, heads = empty(*wide, dtype=dtype), empty(rows, model.heads, model.depth, dtype=dtype)
    yield "rms_norm", run(isobit.rms_norm, x, weight, samples=samples)
    one = empty(model.depth, dtype=dtype)
    yield "rms_norm", run(isobit.rms_norm, heads, one, heads=True, samples=samples)
    yield "layer_norm", run(isobit.layer_norm, x, weight, bias, samples=samples)
    yield "softmax", run(isobit.softmax, x)
    yield "log_softmax", run(isobit.log_softmax, x)
    middle = [empty(rows, model.middle, dtype=dtype) for _ in range(2)]
    yield "silu", run(isobit.silu, middle[0])
    yield "gelu", run(isobit.gelu, middle[0])
    yield "gelu", run(lambda x: isobit.gelu(x, "tanh"), middle[0])
    yield "swiglu", run(isobit.swiglu, *middle)
    angles = [torch.empty(rows, model.depth) for _ in range(2)]
    yield "rotary", run(lambda x: isobit.rotary(x, *angles), heads)
    yield "exact_sum", run(isobit.exact_sum, empty(rows * model.hidden, dtype=dtype))
    ids = torch.zeros(rows, dtype=torch.int64)
    table = empty(model.words, model.hidden, dtype=dtype)
    yield "embedding", run(lambda w: isobit.embedding(ids, w, samples=samples), table)


def product_operators(model, rows, dtype):
    """Yield (operator, call) of linear layers, log-probabilities and attention."""
    samples = packed(rows)

    def linear(columns, extent):
        given = [
            empty(*shape, dtype=dtype) for shape in ((rows, extent), (columns, extent), (columns,))
        ]
        both_ways(lambda *each: isobit.linear(*each, samples=samples), *given)

    yield "linear", lambda: linear(model.hidden, model.hidden)
    yield "linear", lambda: linear(model.middle, model.hidden)
    yield "linear", lambda: linear(model.hidden, model.middle)
    yield "linear", lambda: linear(model.hidden, 512)  # two segments: partial sums in registers

    def logprob():
        hidden, weight = (empty(n, model.hidden, dtype=dtype) for n in (rows, model.words))
        targets = torch.zeros(rows, dtype=torch.int64)
        both_ways(
            lambda *each: isobit.linear_logprob(*each, targets, samples=samples), hidden, weight
        )

    yield "linear_logprob", logprob

    def attention(keys, depth):
        q = empty(rows, model.heads, depth, dtype=dtype)
        k, v = (empty(keys, model.key_heads, depth, dtype=dtype) for _ in range(2))
        if (
            keys == rows
        ):  # a whole sample: it has gradients, unless they do not fit into the GPU's shared memory
            with suppress(isobit.UnsupportedError):
                both_ways(lambda *each: isobit.attention(*each, is_causal=True), q, k, v)
        else:
            isobit.attention(q.detach(), k.detach(), v.detach(), is_causal=True)

    for depth in (64, model.depth):
        yield "attention", lambda depth=depth: attention(rows, depth)
        yield "attention", lambda depth=depth: attention(4096, depth)


def expert_operators(model, rows, dtype):
    """Yield (operator, call) of a mixture of experts; the tokens go to other experts for each number of rows."""
    samples = packed(rows)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, model.experts, generator=generator).argsort(1)[:, : model.chosen]
    logits, x = (empty(rows, n, dtype=dtype) for n in (model.experts, model.hidden))
    weights = empty(rows, model.chosen, dtype=torch.float32)

    def routes(given):
        return isobit.Routes.chosen(ids, given, total=model.experts, samples=samples)

    yield (
        "route",
        lambda: both_ways(
            lambda given: isobit.route(given, model.chosen, samples=samples).weights, logits
        ),
    )

    def experts_of(x, given, first, second):
        route = routes(given)
        y = isobit.grouped_linear(isobit.dispatch_rows(x, route), first, routes=route)
        y = isobit.swiglu(y[:, : model.middle], y[:, model.middle :])
        return isobit.combine(isobit.grouped_linear(y, second, routes=route), route)

    def call():
        first = empty(model.experts, 2 * model.middle, model.hidden, dtype=dtype)
        second = empty(model.experts, model.hidden, model.middle, dtype=dtype)
        both_ways(experts_of, x, weights, first, second)

    yield "experts", call


def every_operator(model, rows, dtype):
    """Yield (operator, call) of every operator at one number of rows."""
    yield from row_operators(model, rows, dtype)
    yield from product_operators(model, rows, dtype)
    if model.experts:
        yield from expert_operators(model, rows, dtype)


def record(target, model, rows, dtype, calls=every_operator):
    """Return the launches of calls at one number of rows."""
    backend = Recording(target)
    with backends.use(backend):
        for operator, call in calls(model, rows, dtype):
            backend.operator = operator
            call()
    return backend.launches


def distinct(launches, key=lambda launch: launch.key):
    """Return the first launch of each binary, or of each `key`."""
    found = {}
    for launch in launches:
        found.setdefault(key(launch), launch)
    return list(found.values())
