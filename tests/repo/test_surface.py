"""Public names are frozen: a change of this list is a change of the product."""

import inspect

import isobit

PUBLIC = [
    "AgreementError",
    "ArgumentError",
    "Certificate",
    "ContractError",
    "Cut",
    "CutError",
    "EngineError",
    "IsobitError",
    "KVCache",
    "KeyedSampling",
    "RevealError",
    "Samples",
    "SimulationError",
    "Tree",
    "UnsupportedError",
    "attention",
    "bits",
    "certify",
    "coverage",
    "embedding",
    "enable",
    "exact_sum",
    "freeze",
    "gelu",
    "guards",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_group",
    "linear_logprob",
    "log_softmax",
    "logprobs",
    "nn",
    "optim",
    "parallel",
    "reveal",
    "rms_norm",
    "rotary",
    "silu",
    "simulator",
    "softmax",
    "swiglu",
    "targets",
]


def test_public_names():
    assert isobit.__all__ == PUBLIC
    assert all(hasattr(isobit, name) for name in PUBLIC)


def test_signatures():
    assert str(inspect.signature(isobit.linear)) == (
        "(x: 'Tensor', weight: 'Tensor', bias: 'Tensor | None' = None, *, samples: 'Samples | None' = None) -> 'Tensor'"
    )
    assert str(inspect.signature(isobit.freeze)) == "(module: 'torch.nn.Module') -> 'Frozen'"
    assert list(inspect.signature(isobit.reveal).parameters) == [
        "target",
        "n",
        "dtype",
        "arithmetic",
        "progress",
    ]
    assert list(inspect.signature(isobit.reveal.certify).parameters)[:3] == [
        "target",
        "configurations",
        "n",
    ]
    assert list(inspect.signature(isobit.Samples.padded).parameters) == [
        "lengths",
        "width",
        "side",
        "first",
        "of",
    ]


def test_every_error_is_an_isobit_error_with_three_parts():
    for name in PUBLIC:
        error = getattr(isobit, name)
        if inspect.isclass(error) and issubclass(error, Exception):
            assert issubclass(error, isobit.IsobitError)
            shown = str(error(expected="a", received="b", remedy="c"))
            assert shown == "expected a\n  received: b\n  remedy: c"
