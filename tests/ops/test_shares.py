"""A share of the global batch has one unrounded gradient; merged by the tree and rounded once, they are the whole.

1. Cuts that gradient-accumulation-v1 does not draw (long samples, the cap on segments, fp16), through autograd, every
   operator that has parameters: the bits of the whole batch.
2. Native equals portable on shares; the operators' stated dtypes are those they return.
3. What is not one collected subtree, delivered unrounded to a leaf, is refused.
"""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from isobit import UnsupportedError, bits
from isobit.ops import dispatch
from isobit.ops.attesting import wide_values
from isobit.ops.embedding.op import embedding
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.linear.group import linear_group
from isobit.ops.linear.op import linear
from isobit.ops.portable.sums import round_once
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import Share, check_share, collecting, share_in_force
from isobit.order.samples import Samples
from isobit.order.tree import Counter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IDS = torch.tensor([0, 3, 4])  # few, so that each occurs in most samples; 3 is padding
needs_native = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")


def grouped(x, w, v, b, samples):
    return torch.cat(linear_group(x, (w, v), (b, None), groups=2, samples=samples), -1)


# (function of rows and parameters; shape of a row of its input, of the parameters, of a row of its output)
OPERATORS = {
    "linear": (
        lambda x, w, b, samples: linear(x, w, b, samples=samples),
        (7,),
        ((5, 7), (5,)),
        (5,),
    ),
    "linear_group": (grouped, (7,), ((4, 7), (2, 7), (4,)), (6,)),
    "rms_norm": (lambda x, w, samples: rms_norm(x, w, samples=samples), (19,), ((19,),), (19,)),
    "rms_norm of heads": (
        lambda x, w, samples: rms_norm(x, w, samples=samples, heads=True),
        (6, 9),
        ((9,),),
        (6, 9),
    ),
    "layer_norm": (
        lambda x, w, b, samples: layer_norm(x, w, b, samples=samples),
        (19,),
        ((19,), (19,)),
        (19,),
    ),
    "embedding": (
        lambda ids, w, samples: embedding(ids, w, samples=samples, padding_idx=3),
        (),
        ((5, 6),),
        (6,),
    ),
}
# (lengths of the global batch's samples, samples of each share): three samples in a segment with empty ones; samples
# beyond a leaf of tokens; more samples than segments, so that the cap of 1024 binds.
CUTS = {
    "odd, unequal": ((3, 0, 1, 8, 0, 0, 0, 6, 2, 2, 9, 1), (3, 3, 6)),
    "long": ((300, 0, 257, 5), (1, 1, 2)),
    "capped": ((1, 0, 2, 1) * 512, (2, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    "capped, four a segment": (
        (1, 0, 1, 0) * 1024,
        (2048, 4, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    ),
}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return wide_values(shape, dtype, torch.Generator().manual_seed(seed))


class Problem:
    """One global batch of one operator."""

    def __init__(self, operator: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
        self.function, row, shapes, out = OPERATORS[operator]
        self.lengths, self.edges, tokens = lengths, [0, *accumulate(lengths)], sum(lengths)
        ids = IDS[torch.randint(0, 3, (tokens,), generator=torch.Generator().manual_seed(1))]
        self.x = drawn((tokens, *row), 1, dtype) if row else ids
        self.grad = drawn((tokens, *out), 2, dtype)
        self.parameters = [
            drawn(shape, 3 + at, dtype).requires_grad_() for at, shape in enumerate(shapes)
        ]

    def whole(self) -> list[Tensor]:
        leaves = [p.detach().requires_grad_() for p in self.parameters]
        y = self.function(self.x, *leaves, samples=Samples.packed(self.lengths))
        return list(torch.autograd.grad(y, leaves, self.grad))

    def shares(self, counts: tuple[int, ...]):
        """(node, gradients) of each share, as autograd delivers them to a collector."""
        for parameter in self.parameters:
            parameter.grad_dtype = (
                torch.float64 if parameter.dtype == torch.float64 else torch.float32
            )
        of, first = len(self.lengths), 0
        for count in counts:
            samples = Samples.packed(self.lengths[first : first + count], first=first, of=of)
            rows = slice(self.edges[first], self.edges[first + count])
            with collecting(Share(first, of, count)):
                self.function(self.x[rows], *self.parameters, samples=samples).backward(
                    self.grad[rows]
                )
            (node,) = samples.roots
            yield node, [p.grad for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            first += count


def merged(shares) -> list[Tensor]:
    counter: Counter[list[Tensor]] = Counter(
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)]
    )
    for node, gradients in shares:
        counter.push(node, gradients)
        assert len(counter) <= 11
    ((_, total),) = counter
    return total


def rounded(total: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [round_once(t, dtype) for t in total]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(bits.first_difference(a, b) is None for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_shares_merge_to_the_whole(operator, dtype):
    for name, (lengths, counts) in CUTS.items():
        if len(lengths) > 1024 and not (dtype == torch.float32 and dispatch.is_native(dtype)):
            continue  # many samples are slow, and one dtype shows what they show
        problem = Problem(operator, lengths, dtype)
        total = merged(problem.shares(counts))
        assert {t.dtype for t in total} == {torch.float32}
        assert same(rounded(total, dtype), problem.whole()), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_fp64_shares_stay_fp64(operator):
    lengths, counts = CUTS["odd, unequal"]
    problem = Problem(operator, lengths, torch.float64)
    total = merged(problem.shares(counts))
    assert same(total, problem.whole())


def test_a_share_has_the_segments_of_the_global_batch():
    """Four samples of 4096 are one segment, folded left; four of four are four segments, merged by pairs."""
    differs = 0
    for operator in OPERATORS:
        problem = Problem(operator, (2, 3, 4, 5), torch.float32)
        share = Samples.packed(problem.lengths, first=0, of=4096)
        for parameter in problem.parameters:
            parameter.grad_dtype = torch.float32
        with collecting(Share(0, 4096, 4)):
            problem.function(problem.x, *problem.parameters, samples=share).backward(problem.grad)
        differs += not same([p.grad for p in problem.parameters], problem.whole())
    assert differs == len(OPERATORS)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_native_equals_portable_on_shares(dtype, monkeypatch):
    for operator in OPERATORS:
        for lengths, counts in (CUTS["odd, unequal"], CUTS["long"]):
            found = [gradients for _, gradients in Problem(operator, lengths, dtype).shares(counts)]
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "is_native", lambda _: False)
                expected = [
                    gradients for _, gradients in Problem(operator, lengths, dtype).shares(counts)
                ]
            assert all(same(a, b) for a, b in zip(found, expected, strict=True)), operator


@needs_native
def test_operators_say_their_dtypes():
    for operator in OPERATORS:
        list(Problem(operator, (2, 2), torch.float32).shares((1, 1)))  # registers the formulas
    x, grad, weight = (drawn(shape, 1, torch.bfloat16) for shape in ((6, 5), (6, 5), (5,)))
    spans, ids = torch.tensor([[0, 2], [2, 4]]), torch.tensor([0, 1, 2, 0, 1, 2])
    scales = torch.ones(6)
    calls = {
        "linear_weight_grad": (grad, x, spans, 8),
        "linear_bias_grad": (grad, spans, 8),
        "rms_norm_backward": (grad, x, weight, scales, spans, False, 8),
        "layer_norm_backward": (grad, x, weight, scales, scales, spans, 8),
        "embedding_weight_grad": (grad, ids, spans, 3, -1, 8),
    }
    for name, arguments in calls.items():
        for prefix in ("", "portable_"):
            operator = getattr(torch.ops.isobit, f"{prefix}{name}")
            torch.library.opcheck(
                operator, arguments, test_utils=("test_schema", "test_faketensor")
            )
            found = operator(*arguments)
            assert (found if isinstance(found, Tensor) else found[1]).dtype == torch.float32
            with pytest.raises(RuntimeError, match="one subtree"):
                operator(*arguments[:-1], 6)  # segments of three


def leaf(dtype=torch.bfloat16, grad_dtype=torch.float32) -> Tensor:
    parameter = torch.ones(3, 3, dtype=dtype, requires_grad=True)
    parameter.grad_dtype = grad_dtype
    return parameter


REFUSED = {
    "no collector": (
        lambda: check_share(Samples.packed([1], first=1, of=4), leaf()),
        "no share is collected",
    ),
    "another share": (
        lambda: in_share(0, Samples.packed([1], first=1, of=4), leaf()),
        "first=0, of=4, size=1",
    ),
    "two subtrees": (
        lambda: in_share(1, Samples.packed([1, 1], first=1, of=4), leaf()),
        "2 subtrees",
    ),
    "rounded": (
        lambda: in_share(1, Samples.packed([1], first=1, of=4), leaf(grad_dtype=torch.bfloat16)),
        "bfloat16",
    ),
    "no leaf": (
        lambda: in_share(1, Samples.packed([1], first=1, of=4), leaf() * 1),
        "other operators",
    ),
}


def in_share(first: int, samples: Samples, parameter: Tensor) -> None:
    with collecting(Share(first, 4, len(samples.spans))):
        check_share(samples, None, parameter)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, match = REFUSED[case]
    with pytest.raises(UnsupportedError, match=f"(?s){match}"):
        call()


def test_no_gradient_no_refusal():
    share = Samples.packed([1], first=1, of=4)
    check_share(share, None, torch.ones(3))
    with torch.no_grad():
        check_share(share, leaf())
    check_share(Samples.packed([1, 1]), leaf())  # a whole batch
    in_share(1, share, leaf())


def test_collecting_nests_and_ends():
    def fail():
        with collecting(Share(2, 4, 2)):
            assert share_in_force() == Share(2, 4, 2)
            raise KeyError

    with collecting(Share(0, 4, 2)):
        with pytest.raises(KeyError):
            fail()
        assert share_in_force() == Share(0, 4, 2)
    assert share_in_force() is None
