"""The Triton executor of the delta rule has the bits of the CPU's executor: outputs, states and gradients.

The interpreter takes seconds for a chunk of 64 rows, so the full run has most cases; each check has a wrong kernel.
"""

import pytest
import torch

pytest.importorskip("triton")

import isobit
from isobit.certifying import executing
from isobit.certifying.running import backends as running
from isobit.foundation import backends
from isobit.library.on_gpu.twins import source
from isobit.ops.attesting import calls_on, wide_values
from isobit.ops.delta_rule import attest
from isobit.ops.gpu.executors import prepare
from tests.gpu.kernel_rules import Reading
from tests.gpu.operator_calls import DTYPES, Call, differences, generator_of
from tests.sweeps import mostly_full

full = pytest.mark.full
CHUNKS = "isobit.ops.delta_rule.triton_chunks"
BACKWARD = "isobit.ops.delta_rule.triton_backward"


def delta_calls(dtype, *shapes):
    """Shapes are (rows, lengths of samples, heads of keys, heads, Dk, Dv); some factors are zeros of both signs."""
    generator, calls = generator_of(dtype), []
    for rows, lengths, key_heads, heads, key_size, value_size in shapes:
        q, k = (wide_values((rows, key_heads, key_size), dtype, generator) / 64 for _ in range(2))
        v = wide_values((rows, heads, value_size), dtype, generator)
        g, beta = (wide_values((rows, heads), dtype, generator) / 64 for _ in range(2))
        v[0], v[-1, :, 0], beta[rows // 2], k[rows // 3] = -0.0, 0.0, 0.0, 0.0
        spans = [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]
        samples = isobit.Samples(tuple(spans), rows, 0, len(spans))

        def call(*given, samples=samples):
            return isobit.delta_rule(*given, samples=samples)

        calls.append(Call(call, (q, k, v, -g.abs(), beta.abs())))
    return calls


FEW = (6, (5,), 1, 1, 2, 3)  # the last row is padding
SMALL = (7, (3, 0, 2), 1, 2, 3, 18)
ODD = [(3, (1, 2), 2, 4, 5, 1), (1, (0,), 1, 1, 4, 4), (68, (66, 2), 1, 1, 17, 3)]


def test_interpreted_bits_are_those_of_the_cpu():
    assert differences(delta_calls(torch.float32, FEW), "interpreter", "sm_90") == []


@full
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
def test_interpreted_bits_of_odd_shapes(dtype):
    assert differences(delta_calls(dtype, SMALL, *ODD), "interpreter", "sm_90") == []


def test_a_compiled_step_has_the_bits_of_the_cpu():
    """One decoded token, behind a state."""
    given = [t[:2].contiguous() for t in attest.inputs(torch.bfloat16, 3)]
    found = []
    for kind in (None, "machine"):
        state = isobit.DeltaState(1, attest.KEY_HEADS, attest.HEADS, attest.KEY, attest.VALUE)
        isobit.delta_rule(*(t[:1] for t in given), state=state)
        with executing(kind, target="sm_90") if kind else torch.no_grad():
            o = isobit.delta_rule(*(t[1:] for t in given), state=state)
        found.append((o, state.packed))
    for a, b in zip(*found, strict=True):
        assert isobit.bits.equal(a, b)


@full
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
def test_compiled_bits_on_every_target(dtype, target, monkeypatch):
    """Also of two chunks, and without races; rows are picked by integers, which have no names of expressions."""
    machine = running.Machine

    def watching(program, engine, names, races):
        return machine(program, engine, names=names, races=True)

    monkeypatch.setattr(running, "Machine", watching)
    calls = delta_calls(dtype, SMALL, (66, (66,), 1, 1, 3, 18))
    assert differences(calls, "machine", target) == []


@full
@pytest.mark.parametrize("kind", ["interpreter", "machine"])
def test_the_attestation_compares_states_and_gradients(kind):
    """Two calls of one sample, of which the second begins in an open chunk and fills it."""
    with executing(kind):
        for name in ("delta_rule", "sigmoid_gate", "decay_gate"):
            prepare(name, torch.float32)
        assert attest.difference_on_gpu(torch.float32, calls_on(torch.device("cpu"))) is None


WRONG = {
    "a rounding in between": (
        CHUNKS,
        ("new = rate[:, None]", "new = rate.to(tl.bfloat16)[:, None]"),
    ),
    "rows after themselves": (CHUNKS, ("(row > j) & fresh", "(row >= j) & fresh")),
    "decays of other rows": (
        BACKWARD,
        ("fade * upstream.to(tl.float32)", "upstream.to(tl.float32)"),
    ),
}


@pytest.mark.parametrize("name", mostly_full(list(WRONG), ["rows after themselves"]))
def test_a_wrong_kernel_is_found(name):
    module, *changes = WRONG[name]
    calls = delta_calls(torch.float32, FEW) if "decays" not in name else two_chunks()
    with source(module, *changes)():
        assert differences(calls, "interpreter", "sm_90") != []


def two_chunks():
    return delta_calls(torch.float32, (66, (66,), 1, 1, 2, 3))


@full
def test_ptx_keeps_the_rules():
    for dtype, target in zip(DTYPES, ("sm_80", "sm_90", "sm_100"), strict=True):
        with backends.use(Reading(target)) as backend:
            for call in delta_calls(dtype, SMALL, (66, (66,), 1, 2, 64, 64)):
                call.results()
        assert len(backend.read) >= 6
        assert backend.broken == []
