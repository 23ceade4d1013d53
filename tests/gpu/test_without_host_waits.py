"""Theorem: after its first call, a step of training or of decoding reads nothing on the host: a graph can hold it.

The stand-in for a capture raises on every copy from and to the host in isobit's code. Kernels are not run.
"""

import sys
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import isobit
from benchmarks.host_time import Nowhere
from isobit.foundation import backends
from isobit.ops import device_tables
from isobit.ops.attention.op import Places

BF16 = torch.bfloat16
WAITS = (
    *("tolist", "item", "cpu", "numpy", "pin_memory", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("nonzero", "unique", "masked_select", "equal", "allclose"),
)
OF_TORCH = (
    *("tensor", "as_tensor", "equal", "allclose", "nonzero", "unique", "unique_consecutive"),
    *("bincount", "masked_select", "is_nonzero"),
)
ON_CPU = ("inverse", "scale_of")  # a temperature, which is a number on the CPU


@pytest.fixture
def card(monkeypatch):
    """A stand-in for a capture: `with card()` raises where isobit's code waits; `card.waits` counts them outside."""
    waits, open_captures = Counter(), []

    def watched(place, name):
        real = getattr(place, name)

        def wait(*given, **named):
            caller = sys._getframe(1).f_code
            if "/isobit/" in caller.co_filename and caller.co_name not in ON_CPU:
                waits[name] += 1
                if open_captures:
                    raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
            return real(*given, **named)

        monkeypatch.setattr(place, name, wait)

    for name in WAITS:
        watched(Tensor, name)
    for name in OF_TORCH:
        watched(torch, name)
    monkeypatch.setattr(device_tables, "is_capturing", lambda: bool(open_captures))
    for module in ("ops.embedding.triton", "ops.logprob.op"):
        monkeypatch.setattr(f"isobit.{module}.is_capturing", lambda: bool(open_captures))
    monkeypatch.setattr(device_tables, "_made", {})
    monkeypatch.setattr(device_tables, "_captured", {})

    @contextmanager
    def capture():
        open_captures.append(1)
        try:
            yield
        finally:
            open_captures.pop()

    capture.waits = waits
    backend = Nowhere()
    capture.backend = backend
    with backends.use(backend):
        yield capture


LAUNCHES = 138  # of a step of training with 2 layers


class Step:
    """Qwen3 of some layers: embedding, the layers, a last norm, and log-probabilities.

    A layer has two norms, a product for queries, keys and values, norms of heads, rotary positions, attention, a
    product, and a gated MLP. All layers have the same weights, which changes no launch.
    """

    def __init__(self, batch, tokens, keys=None, layers=2):
        def made(*shape):
            return torch.zeros(shape, dtype=BF16, requires_grad=True)

        self.ids = torch.zeros(batch, tokens, dtype=torch.int64)
        self.keys = None if keys is None else torch.zeros(batch, keys, 2, 64, dtype=BF16)
        self.table = torch.zeros(100, 256, dtype=BF16)
        self.angles = torch.zeros(batch, tokens, 64)
        self.layers = layers
        self.weights = [
            *(made(256), made(256), made(256)),
            *(made(256, 256), made(128, 256), made(128, 256), made(64), made(64), made(256, 256)),
            *(made(512, 256), made(512, 256), made(256, 512), made(100, 256)),
        ]

    def forward(self, samples=None):
        first, second, last, *projections, gate, up, down, words = self.weights
        queries, keys, values, q_norm, k_norm, out = projections
        given = {"samples": samples}
        x = isobit.embedding(self.ids, self.table)
        for _ in range(self.layers):
            h = isobit.rms_norm(x, first, **given)
            made = isobit.linear_group(h, (queries, keys, values), **given)
            q, k, v = (one.unflatten(-1, (-1, 64)) for one in made)
            q = isobit.rms_norm(q, q_norm, heads=True, **given)
            k = isobit.rms_norm(k, k_norm, heads=True, **given)
            q, k = (isobit.rotary(one, self.angles, self.angles) for one in (q, k))
            if self.keys is not None:
                k = v = self.keys
            y = isobit.attention(q, k, v, is_causal=True, q_samples=samples, k_samples=samples)
            x = x + isobit.linear(y.flatten(-2), out, **given)
            h = isobit.rms_norm(x, second, **given)
            h = isobit.swiglu(*isobit.linear_group(h, (gate, up), **given))
            x = x + isobit.linear(h, down, **given)
        x = isobit.rms_norm(x, last, **given)
        return isobit.linear_logprob(x, words, self.ids, **given)

    def train(self, samples=None):
        y = self.forward(samples)
        torch.autograd.grad(y, self.weights, torch.zeros_like(y))


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_of_training_is_captured(card, packed):
    step, samples = Step(2, 64), isobit.Samples.packed([64, 64]) if packed else None
    step.train(samples)
    assert sum(card.waits.values()) > 5  # the tables of the first step
    card.waits.clear()
    card.backend.launches = 0
    step.train(samples)
    again = Counter(card.waits)
    with card():
        step.train(samples)
    # Targets and ids, which a capture checks on the device.
    assert again == {"__bool__": 2}
    assert card.backend.launches == 2 * LAUNCHES


def test_launches_and_waits_of_36_layers(card):
    """Qwen3-8B has 36: a step waits for the checks of ids and targets only, however many layers there are."""
    training, decoding = Step(2, 64, layers=36), Step(2, 1, keys=300, layers=36)
    found = []
    for step, call in ((training, training.train), (decoding, decoding.forward)):
        with torch.set_grad_enabled(step is training):
            call()
            card.waits.clear()
            card.backend.launches = 0
            call()
        found.append((card.backend.launches, dict(card.waits)))
    assert found == [(2212, {"__bool__": 2}), (581, {"__bool__": 2})]


def test_a_step_of_decoding_is_captured(card):
    step = Step(2, 1, keys=300)
    with torch.no_grad():
        step.forward()
        card.waits.clear()
        with card():
            step.forward()
    assert not card.waits
    assert device_tables._captured  # a graph reads its tables when it is replayed
    device_tables._made.clear()
    assert device_tables._captured


def test_what_was_not_seen_before_is_refused_by_name(card):
    step = Step(2, 1, keys=300)
    with torch.no_grad():
        with card(), pytest.raises(isobit.UnsupportedError, match="once before it is captured"):
            step.forward()
        step.forward()
        step.keys = step.keys[:, :200]
        with card(), pytest.raises(isobit.UnsupportedError, match="once before it is captured"):
            step.forward()


def test_the_gradient_of_an_embedding_and_a_cache_are_refused_in_a_capture(card):
    table = torch.zeros(9, 16, dtype=BF16, requires_grad=True)
    y = isobit.embedding(torch.zeros(1, 4, dtype=torch.int64), table)
    with card(), pytest.raises(isobit.UnsupportedError, match="depend on the ids"):
        y.sum().backward()
    tags = [
        getattr(torch.ops.isobit, f"triton_embedding{end}").default.tags
        for end in ("", "_weight_grad")
    ]
    assert [torch.Tag.cudagraph_unsafe in each for each in tags] == [False, True]
    cache = isobit.KVCache(num_heads=1, head_dim=16, dtype=BF16)
    sequence, rows = cache.start(), torch.zeros(3, 1, 16, dtype=BF16)
    cache.append(sequence, rows, rows)
    cache.attend(rows[:1], [sequence])
    with card(), pytest.raises(isobit.UnsupportedError, match="KVCache"):
        cache.attend(rows[:1], [sequence])


def delta(samples=None, state=None, grad=True):
    """Call the delta rule behind its convolution, and both backward."""
    x, taps = torch.zeros(2, 70, 32), torch.zeros(32, 1, 4)
    gates = torch.zeros(2, 70, 2)
    for tensor in (x, taps, gates):
        tensor.requires_grad_(grad)
    y = isobit.causal_conv(x, taps, samples=samples).unflatten(-1, (2, 16))
    y = isobit.delta_rule(y, y, y, gates, gates, samples=samples, state=state)
    if grad:
        torch.autograd.grad(y, (x, taps, gates), torch.zeros_like(y))


@pytest.mark.parametrize("packed", [False, True])
def test_the_delta_rule_is_captured(card, monkeypatch, packed):
    # On a GPU its executor asserts that decays are no growth.
    monkeypatch.setattr("isobit.ops.delta_rule.op.refuse_growth", lambda g: None)
    samples = isobit.Samples.packed([66, 1, 73]) if packed else None
    with card(), pytest.raises(isobit.UnsupportedError, match="once before it is captured"):
        delta(samples)
    delta(samples)
    card.waits.clear()
    delta(samples)
    assert not card.waits
    with card():
        delta(samples)
    # Wrong: a table that is made at every call.
    monkeypatch.setattr("isobit.ops.delta_rule.triton.kept", lambda key, device, make: make())
    with card(), pytest.raises(isobit.UnsupportedError, match="changes at every call"):
        delta(samples)


def test_the_state_of_the_delta_rule_is_refused_in_a_capture(card, monkeypatch):
    """A graph would read the rows of the state that were open when it was captured."""
    monkeypatch.setattr("isobit.ops.delta_rule.op.refuse_growth", lambda g: None)
    state, samples = isobit.DeltaState(3, 2, 2, 16, 16), isobit.Samples.packed([66, 1, 73])
    delta(samples, state, grad=False)
    card.waits.clear()
    delta(samples, state, grad=False)
    assert not set(card.waits) - {"tensor"}  # tables are copied; the host does not wait for them
    with card(), pytest.raises(isobit.UnsupportedError, match=r"isobit\.delta_rule: .*\n.*state="):
        delta(samples, state, grad=False)
    with card(), pytest.raises(isobit.UnsupportedError, match=r"DeltaState\.select"):
        state.select(torch.tensor([0]))


def test_a_mixture_of_experts_waits_once(card):
    """For the number of rows of each expert, which all layers and gradients of these routes share."""
    x, weight, logits = (
        torch.zeros(size, dtype=BF16, requires_grad=True) for size in ((9, 16), (4, 8, 16), (9, 4))
    )
    samples = isobit.Samples.packed([5, 0, 4])

    def step():
        routes = isobit.route(logits, 2, samples=samples)
        rows = isobit.dispatch_rows(x, routes)
        y = [isobit.grouped_linear(rows, weight, routes=routes) for _ in range(2)]
        out = isobit.combine(y[0] + y[1], routes)
        return torch.autograd.grad(out, (x, weight, logits), torch.zeros_like(out))

    step()
    card.waits.clear()
    step()
    assert card.waits["cpu"] == 1
    # Of numbers that are on the host already.
    assert not set(card.waits) - {"cpu", "tolist"}, card.waits
    with card(), pytest.raises(isobit.UnsupportedError, match=r"isobit\.route: .*\n.*each expert"):
        step()
    ids = torch.tensor([[0, 1]])
    with card(), pytest.raises(isobit.UnsupportedError, match=r"Routes\.chosen, whose"):
        isobit.Routes.chosen(ids, torch.zeros(1, 2), total=4)


def test_new_routes_at_every_step_keep_no_tables(card):
    """Each expert has rows of its own at every step: kept, they would push out the tables of the samples."""
    x, weight = torch.zeros(40, 16, dtype=BF16), torch.zeros(8, 8, 16, dtype=BF16)
    weight.requires_grad_()
    samples, sizes = isobit.Samples.packed([15, 0, 25]), []
    for seed in range(4):
        logits = torch.rand(40, 8, generator=torch.Generator().manual_seed(seed))
        routes = isobit.route(logits, 2, samples=samples)
        y = isobit.grouped_linear(isobit.dispatch_rows(x, routes), weight, routes=routes)
        torch.autograd.grad(y, weight, torch.zeros_like(y))
        sizes.append(len(device_tables._made))
    assert sizes[0] == sizes[-1] > 0
    with card(), pytest.raises(isobit.UnsupportedError, match="gradient of grouped_linear, whose"):
        torch.autograd.grad(
            isobit.grouped_linear(isobit.dispatch_rows(x, routes), weight, routes=routes),
            weight,
            torch.zeros_like(y),
        )


def test_routes_can_be_saved(card, tmp_path):
    routes = isobit.route(torch.rand(6, 4), 2)
    torch.save(routes.tokens, tmp_path / "tokens.pt")
    assert torch.equal(torch.load(tmp_path / "tokens.pt"), routes.tokens)


def test_an_exact_sum_is_captured_and_a_norm_is_not(card):
    x = torch.zeros(3000, requires_grad=True)
    isobit.exact_sum(x)
    card.waits.clear()
    with card():
        isobit.exact_sum(x).backward()
    assert not card.waits
    p = torch.nn.Parameter(torch.zeros(9))
    p.grad = torch.zeros(9)
    optimizer = isobit.optim.AdamW([p])
    calls = {
        r"isobit\.optim\.get_total_norm: ": lambda: isobit.optim.get_total_norm([p]),
        r"isobit\.optim\.clip_grad_norm_: ": lambda: isobit.optim.clip_grad_norm_([p], 1.0),
        r"optim\.AdamW\.step, whose number": optimizer.step,
    }
    for name, call in calls.items():
        with card(), pytest.raises(isobit.UnsupportedError, match=name):
            call()


def test_a_stock_read_is_seen(card):
    """The stand-in raises on what it should: a table that isobit did not make."""
    spans = torch.zeros(1, 2, dtype=torch.int64)
    assert device_tables.values_of(spans) == [[0, 0]]
    with card(), pytest.raises(isobit.UnsupportedError, match="did not make"):
        device_tables.values_of(spans)


def test_a_table_that_was_written_into_is_read_again():
    table = device_tables.copied([[0, 3]], (1, 2), torch.device("cpu"))
    assert device_tables.values_of(table) == [[0, 3]]
    table[0, 1] = 5
    assert device_tables.values_of(table) == [[0, 5]]


def test_tables_outlive_inference_mode_and_fake_tensors():
    """A table that was made under inference_mode could not be saved for a backward; a fake one is no table."""
    device_tables._made.clear()
    q = torch.randn(1, 37, 1, 16)
    with torch.inference_mode():
        isobit.attention(q, q, q, is_causal=True)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(1, 41, 1, 16)
        isobit.attention(fake, fake, fake, is_causal=True)
    for rows in (37, 41):
        x = torch.randn(1, rows, 1, 16, requires_grad=True)
        isobit.attention(x, x, x, is_causal=True).sum().backward()
        assert x.grad.isfinite().all()


def test_tables_of_a_transform_are_not_kept():
    """Such a table is wrapped for its level of torch.func, and dead after it."""
    device_tables._made.clear()
    made = []

    def f(x):
        made.append(device_tables.table_of((0, 3), (1, 2), x.device))
        return x.sum()

    torch.func.grad(f)(torch.ones(3))
    later = device_tables.table_of((0, 3), (1, 2), torch.device("cpu"))
    assert later is not made[0]
    assert later.untyped_storage().nbytes() == 16  # a dead wrapper has no storage


def test_threads_make_the_same_tables():
    q = torch.randn(3, 29, 1, 16)
    known, found = isobit.attention(q, q, q, is_causal=True), []
    device_tables._made.clear()
    threads = [
        threading.Thread(target=lambda: found.append(isobit.attention(q, q, q, is_causal=True)))
        for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(found) == 8
    assert all(isobit.bits.equal(one, known) for one in found)


class Stream:
    """A stand-in for a stream, which writes down what it was told."""

    def __init__(self):
        self.waited_for = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited_for.append(event)


class Table(Tensor):
    """A tensor of some bytes, which writes down the streams that use it."""

    @staticmethod
    def __new__(cls, size):
        made = torch.zeros(size, dtype=torch.uint8).as_subclass(cls)
        made.used_on = []
        return made

    def record_stream(self, stream):
        self.used_on.append(stream)


def test_another_stream_waits_for_the_copy_of_a_table(monkeypatch):
    one, other = Stream(), Stream()
    monkeypatch.setattr(device_tables, "_made", {})
    monkeypatch.setattr(device_tables, "_is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for stream in (one, one, other):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        found = device_tables.kept("lengths", torch.device("cuda"), lambda: (7, Table(3)))
        assert found[0] == 7
    assert (one.waited_for, other.waited_for) == ([], [one])
    # Else its memory could be used again while the other stream reads it, once it is dropped.
    assert found[1].used_on == [other]


def test_the_number_of_tables_is_bounded(monkeypatch):
    monkeypatch.setattr(device_tables, "_made", {})
    monkeypatch.setattr(device_tables, "MOST", 8)
    for rows in range(1, 40):
        q = torch.zeros(1, rows, 1, 16)
        Places(q, q, None, None)
    assert 0 < len(device_tables._made) <= 8


@pytest.mark.parametrize(("limit", "value"), [("MOST", 8), ("MOST_BYTES", 8 * 16)])
def test_tables_that_are_used_are_not_dropped(monkeypatch, limit, value):
    monkeypatch.setattr(device_tables, "_made", {})
    monkeypatch.setattr(device_tables, limit, value)
    made = []

    def table(rows):
        def make():
            made.append(rows)
            return torch.zeros(2, dtype=torch.int64)

        return device_tables.kept(rows, torch.device("cpu"), make)

    for rows in range(1, 40):
        table(0)
        table(rows)
    assert made == list(range(40))
    assert sorted(rows for rows, _ in device_tables._made) == [0, *range(33, 40)]


def test_an_id_without_a_row_is_not_a_silent_zero(monkeypatch):
    """Torch for ROCm leaves assertions on the device out: then the row is NaN, and no other row is touched."""
    monkeypatch.setattr("isobit.ops.embedding.triton.is_capturing", lambda: True)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    table = torch.randn(5, 16)
    with isobit.certifying.executing("interpreter", target="sm_90"):
        y = torch.ops.isobit.triton_embedding(torch.tensor([4, 5, -1, 0]), table, None, -1)
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3]], table[[4, 0]])
