"""Every planted wrong kernel is caught: by names, by bits or by a refusal."""

import pytest

from tests.certifying.controls import CONTROLS


@pytest.mark.parametrize("name", CONTROLS)
def test_a_planted_wrong_kernel_is_caught(name):
    caught, how = CONTROLS[name]()
    assert caught, how
