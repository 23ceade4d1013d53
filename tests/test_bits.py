"""Bits: equality over dtype, shape, ±0 and NaN payloads; the first difference by index; digests of values."""

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

import isobit
from isobit import bits


def test_equality_is_of_bits():
    assert bits.equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not bits.equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bits.equal(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not bits.equal(torch.tensor([1.0]), torch.tensor([[1.0]]))
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not bits.equal(quiet, other)
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert bits.equal(strided, strided.contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_first_difference(dtype):
    a = torch.randn(5, 7).to(dtype)
    b = a.clone()
    b[3, 2] = torch.nextafter(b[3, 2], torch.tensor(torch.inf, dtype=dtype))
    b[4, 6] = 0.0
    found = bits.first_difference(a, b)
    assert (found.what, found.index, found.ulps, found.count, found.total) == (
        "bits",
        (3, 2),
        1,
        2,
        35,
    )
    assert found.left.startswith("0x")
    assert len(found.left) == 2 + 2 * a.element_size()
    assert bits.first_difference(a, a.clone()) is None
    assert bits.first_difference(a, a[:1]).what == "shape"
    assert bits.first_difference(a, a.to(torch.int32)).what == "dtype"


def test_ulps_count_across_zero():
    small = torch.tensor(2.0**-149)
    assert bits.ulp_distance(small, -small) == 2
    assert bits.ulp_distance(torch.tensor(0.0), torch.tensor(-0.0)) == 0
    assert bits.ulp_distance(torch.tensor(torch.nan), small) is None


def test_a_tensor_without_memory_has_no_digest():
    inside = torch.arange(4.0)
    for wrapper in (AsyncCollectiveTensor(inside), TwoTensor(inside, inside)):
        with pytest.raises(isobit.ArgumentError, match="which has none"):
            bits.digest(wrapper)
        with pytest.raises(isobit.ArgumentError, match="which has none"):
            bits.digest({"x": wrapper})


def test_digests():
    a = torch.randn(8, 8)
    assert bits.digest(a) == bits.digest(a.t().contiguous().t())
    assert bits.digest(a) != bits.digest(a.t())
    assert bits.digest(a) != bits.digest(a.reshape(64))
    assert bits.digest(torch.zeros(2)) != bits.digest(-torch.zeros(2))
    assert bits.digest(torch.zeros(2)) != bits.digest(torch.zeros(2, dtype=torch.int32))
    module = torch.nn.Linear(3, 3)
    assert bits.digest(module) == bits.digest(dict(reversed(module.state_dict().items())))
    assert bits.digest({"ab": a, "c": a}) != bits.digest({"a": a, "bc": a})
    assert len(bits.digest(torch.empty(0))) == 32
