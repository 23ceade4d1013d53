"""Expressions that differ in where a sign stands have one name, and the same bits for all inputs."""

import numpy as np

from isobit.certifying.names import arithmetic, names

SPECIAL = np.array(
    [
        0,
        1 << 31,
        1,
        0x80000001,
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F7FFFFF,
    ],
    np.uint32,
)
A, B, C = (names.input_names(label, 5, 32) for label in "abc")


def minus(name):
    """The name of the negative of a product or a constant, as an operand."""
    return names.mul(name, names.constant_float(-1.0))


def values():
    random = np.random.default_rng(3)
    drawn = random.integers(0, 1 << 32, (3, 200_000), dtype=np.uint32)
    corners = np.stack(np.meshgrid(SPECIAL, SPECIAL, SPECIAL)).reshape(3, -1)
    return [each.view(np.float32) for each in np.concatenate([drawn, corners.astype(np.uint32)], 1)]


def test_a_difference_is_a_sum_with_the_negative():
    constant, negated = names.constant_float(1.5), names.constant_float(-1.5)
    assert (names.sub(A, constant) == names.add(A, negated)).all()
    product, other = names.mul(B, constant), names.mul(B, negated)
    assert (names.sub(A, product) == names.add(A, other)).all()
    assert (names.add(A, product) == names.sub(A, other)).all()
    a, b, _ = values()
    with np.errstate(all="ignore"):
        pairs = (
            (a - b, a + (-b)),
            (a - b * np.float32(1.5), a + b * np.float32(-1.5)),
            ((-a) * b, -(a * b)),
        )
        for left, right in pairs[:2]:
            assert (arithmetic.patterns(left) == arithmetic.patterns(right)).all()
        left, right = pairs[
            2
        ]  # of a NaN, the sign may differ: no name is given to the outer sign alone
        assert (left.view(np.uint32) == right.view(np.uint32))[~np.isnan(left)].all()


def test_different_signs_have_different_names():
    constant, negated = names.constant_float(1.5), names.constant_float(-1.5)
    assert (names.sub(A, B) != names.sub(B, A)).all()
    assert (names.sub(A, B) != names.add(A, B)).all()
    assert (names.mul(A, constant) != names.mul(A, negated)).all()
    assert (names.div(A, B) != names.div(B, A)).all()
    assert (names.fma(A, constant, C) != names.fma(A, negated, C)).all()
    # -(a + b) and (-a) + (-b) differ where the sum is zero
    assert (minus(names.add(A, B)) != names.add(minus(A), minus(B))).all()
