"""Products of +0 and +0 at the end of a run change no bits of a tensor core's sum.

A run whose length is not a multiple of 16 is padded with such products by the plan and by the kernels. A step of
NVIDIA's engines has no -0 among its results, so the sign of a zero cannot change either, unless the accumulator is
given as -0; runs start from +0. CDNA3 has -0, and padding makes it +0: there the padding is part of the order.
"""

import numpy as np
import pytest

from isobit.certifying.names.leaf import fused_sum
from isobit.order.engines import TENSOR_CORES

ENGINES = [name for name in TENSOR_CORES if "bf16" in TENSOR_CORES[name]]
KINDS = {  # raw patterns of each kind of factor
    "any": lambda random, shape: random.integers(0, 1 << 16, shape),
    "zeros and subnormals": lambda random, shape: random.choice(
        [0, 0x8000, 1, 0x8001, 0x7F], shape
    ),
    "near one": lambda random, shape: (
        random.integers(0x3F00, 0x4000, shape) | random.choice([0, 0x8000], shape)
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_bits(engine, dtype, kind):
    random = np.random.default_rng(7)
    compared = 0
    for length in (1, 3, 4, 7, 8, 9, 12, 15, 16, 17, 25):
        a, b = (KINDS[kind](random, (2000, length)).astype(np.uint16) for _ in range(2))
        start = np.zeros(2000, np.float32)
        plain = fused_sum(a, b, start, engine, dtype)
        width = ((0, 0), (0, -length % 16))
        for more in (0, 16):  # a whole instruction of padding, too
            padded = [np.pad(np.pad(each, width), ((0, 0), (0, more))) for each in (a, b)]
            given = fused_sum(*padded, start, engine, dtype)
            differ = given.view(np.uint32) != plain.view(np.uint32)
            if engine == "cdna3":
                assert (given[differ].view(np.uint32) == 0).all()
                assert (plain[differ].view(np.uint32) == 1 << 31).all()
            else:
                assert not differ.any()
            compared += given.size
    assert compared == 11 * 2 * 2000


@pytest.mark.parametrize("engine", ENGINES)
def test_another_product_does_change_bits(engine):
    """The comparison above can tell: a product that is not zero shows."""
    a = np.full((10, 16), 0x3F80, np.uint16)
    b, start = a.copy(), np.zeros(10, np.float32)
    b[:, -1] = 0
    whole, without = (fused_sum(a, each, start, engine, "bf16") for each in (a, b))
    assert (whole != without).all()
