"""What models return and remember: every form of output, tensors without rows, and state that a forward changes."""

import collections
import dataclasses
import threading

import pytest
import torch
from torch import nn

import isobit
from isobit.cli import main
from isobit.errors import ArgumentError


class Wrapped(nn.Module):
    """A clean layer, and a function of its result."""

    def __init__(self, call=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call = isobit.nn.Linear(8, 8), call

    def forward(self, x):
        return self.call(self.layer(x))


X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


@torch.library.custom_op("tested::add_mean_of_batch", mutates_args=())
def add_mean_of_batch(x: torch.Tensor) -> torch.Tensor:
    return x + x.mean(0)


@dataclasses.dataclass
class Fields:
    first: object
    second: object = None


Named = collections.namedtuple("Named", "logits extra")


def itself(y):
    made = {"y": y}
    made["again"] = made
    return made


FORMS = {
    "whole numbers as keys": lambda y: {0: y, 1: y * 2},
    "the same key twice, as text": lambda y: {1: y, "1": y * 2},
    "keys of other types": lambda y: {None: y, (0, 1): [y]},
    "a dataclass": lambda y: Fields(y, {2: y}),
    "a named tuple": lambda y: Named(y, [y, None]),
    "a dictionary in itself": itself,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_output_is_compared(name):
    for backward in (False, True):
        report = isobit.audit(Wrapped(FORMS[name]), X, vary=("batch",), backward=backward)
        assert report.kept, report.axes[0].why_not


def test_no_output_hides_another_of_the_same_name():
    model = Wrapped(lambda y: {1: y, "1": add_mean_of_batch(y)})
    report = isobit.audit(model, X, vary=("batch",))
    assert [one.place.operator for one in report.guilty] == ["tested::add_mean_of_batch"]


WITHOUT_ROWS = {
    "a sparse_coo tensor": lambda y: y[:, 0].to_sparse(),
    "a nested tensor": lambda y: torch.nested.nested_tensor(list(y), layout=torch.jagged),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_outputs_without_rows_are_refused_with_a_remedy(name):
    with pytest.raises(ArgumentError, match=name) as raised:
        isobit.audit(Wrapped(WITHOUT_ROWS[name]), X, vary=("batch",))
    assert "a module that wraps the model" in str(raised.value)
    with pytest.raises(ArgumentError, match=name):
        isobit.audit(Wrapped(), WITHOUT_ROWS[name](X), vary=("batch",))


@pytest.mark.parametrize("axis", ["batch", "repeat"])
@pytest.mark.parametrize(
    "call",
    [
        lambda y: torch.sparse.mm(y[:, 0].to_sparse(), torch.eye(8)),
        lambda y: torch.nested.to_padded_tensor(WITHOUT_ROWS["a nested tensor"](y), 0.0),
    ],
)
def test_operators_on_tensors_without_rows_are_named_and_not_judged(call, axis):
    report = isobit.audit(Wrapped(call), X, vary=(axis,))
    assert not report.guilty
    assert all("rows are not followed" in one.reason for one in report.unjudged)
    assert report.unjudged
    assert report.exit_code == (2 if axis == "batch" else 0)  # repeated as a whole, it is equal


@pytest.mark.parametrize("made", [lambda y: {y}, lambda y: [{"a": {y}}]])
def test_a_set_of_tensors_is_refused(made):
    with pytest.raises(ArgumentError, match="a set of tensors"):
        isobit.audit(Wrapped(made), X, vary=("batch",))


def test_outputs_in_too_many_containers_are_refused():
    def deep(y):
        for _ in range(3000):
            y = [y]
        return y

    with pytest.raises(ArgumentError, match="containers"):
        isobit.audit(Wrapped(deep), X, vary=("batch",))


def test_a_backward_audit_needs_a_tensor():
    with pytest.raises(ArgumentError, match="returns a floating-point tensor"):
        isobit.audit(Wrapped(lambda y: "text"), X, vary=("batch",), backward=True)


def test_a_model_that_returns_one_number_has_a_backward_audit():
    report = isobit.audit(Wrapped(lambda y: y.sum()), X, vary=("repeat",), backward=True)
    assert report.kept, report.axes[0].why_not


class Remembers(nn.Module):
    """A model whose forward replaces buffers and attributes, and creates others at its first call."""

    def __init__(self):
        super().__init__()
        self.layer = isobit.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", None)
        self.calls, self.shapes, self.last = 0, [], None
        self.by_size, self.seen = {}, set()

    def forward(self, x):
        y = self.layer(x)
        self.count = self.count + 1
        self.mean.mul_(0.5).add_(y.mean((0, 1)))
        if not hasattr(self, "ready"):
            self.ready = True
            self.register_buffer("lazy", torch.ones(8), persistent=False)
            self.table = torch.ones(8)
        self.calls += 1
        self.shapes.append(x.shape)
        self.by_size[len(x)] = y
        self.seen.add(len(x))
        self.last = y
        return y * self.lazy * self.table


def test_replaced_buffers_and_attributes_are_put_back():
    model = Remembers()
    count, mean = model.count, model.mean
    for _ in range(2):
        report = isobit.audit(model, X, vary=("batch", "repeat", "threads"))
        assert report.kept, [axis.why_not for axis in report.axes]
        assert model.count is count
        assert model.mean is mean
        assert (count.item(), mean.abs().max().item()) == (0, 0)
        assert (model.table, model.last, model.calls) == (None, None, 0)
        assert (model.shapes, model.by_size, model.seen) == ([], {}, set())
        assert set(dict(model.named_buffers())) == {"count", "mean"}
        assert not hasattr(model, "ready")
    model(X)
    before = isobit.bits.digest(dict(model.named_buffers()))
    last, table = model.last, model.table
    isobit.audit(model, X, vary=("batch",), backward=True)
    assert isobit.bits.digest(dict(model.named_buffers())) == before
    assert model.last is last
    assert model.table is table
    assert (model.calls, len(model.shapes), list(model.by_size)) == (1, 1, [4])


def test_state_is_put_back_after_an_error():
    class Fails(Remembers):
        def forward(self, x):
            y = super().forward(x)
            if len(x) == 1:
                raise RuntimeError("one sample only")
            return y

    model = Fails()
    with pytest.raises(RuntimeError, match="one sample only"):
        isobit.audit(model, X, vary=("batch",))
    assert (model.calls, model.count.item(), hasattr(model, "ready")) == (0, 0, False)


def test_tied_and_shared_buffers_are_put_back():
    model = nn.Sequential(Remembers(), Remembers())
    model[1].mean = model[0].mean
    shared = model[0].mean
    isobit.audit(model, X, vary=("batch",))
    assert model[0].mean is shared
    assert model[1].mean is shared
    assert not shared.any()


def test_a_model_with_lazy_parameters_is_refused():
    with pytest.raises(ArgumentError, match="call the model once"):
        isobit.audit(nn.Sequential(nn.LazyLinear(4)), X, vary=("batch",))


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(ArgumentError, match="meta device"):
        isobit.audit(nn.Linear(8, 8, device="meta"), X, vary=("batch",))


@pytest.fixture
def compiled():
    """Return a function that compiles with a backend whose code gives other bits, as fused code may."""
    torch._dynamo.reset()

    def made(function, scale=1.5):
        def backend(graph, inputs):
            return lambda *args: [one * scale for one in graph(*args)]

        return torch.compile(function, backend=backend)

    yield made
    torch._dynamo.reset()


class CallsCompiled(nn.Module):
    """Compiled code that is no module."""

    def __init__(self, compiled):
        super().__init__()
        self.layer, self.function = isobit.nn.Linear(8, 8), compiled(lambda y: y + 0)

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize("form", ["the model", "a module", "in place", "a function"])
@pytest.mark.parametrize("called", [True, False])
def test_compiled_code_is_never_called_innocent_and_stays_compiled(compiled, form, called):
    model = {
        "the model": lambda: compiled(Wrapped()),
        "a module": lambda: nn.Sequential(Wrapped(), compiled(Wrapped())),
        "in place": Wrapped,
        "a function": lambda: CallsCompiled(compiled),
    }[form]()
    if form == "in place":
        model.compile(backend=lambda graph, inputs: lambda *args: [1.5 * y for y in graph(*args)])
    with torch.no_grad():
        before = model(X) if called else None
        for axis in ("batch", "repeat"):
            report = isobit.audit(model, X, vary=(axis,))
            assert report.exit_code == 2
            assert "before torch.compile" in report.axes[0].why_not
        assert before is None or torch.equal(model(X), before)


def test_a_compiled_model_with_the_same_bits_is_not_called_innocent(compiled):
    report = isobit.audit(compiled(Wrapped(), scale=1.0), X, vary=("batch", "compile"))
    assert report.exit_code == 2
    assert [one.reason for one in report.skipped] == [
        "the model is compiled already; pass the module before torch.compile"
    ]


def test_models_of_two_threads_keep_their_state():
    models, failures = [Remembers() for _ in range(4)], []

    def run(model):
        try:
            assert isobit.audit(model, X, vary=("batch", "repeat")).kept
            assert (model.calls, model.count.item()) == (0, 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_audits_in_threads_leave_compiled_code_compiled(compiled):
    function = compiled(lambda x: x + 0)
    assert torch.equal(function(X), X * 1.5)
    models = [Wrapped(lambda y: [y * 2 for _ in range(20)]) for _ in range(6)]
    threads = [
        threading.Thread(target=isobit.audit, args=(model, X), kwargs={"vary": ("batch", "repeat")})
        for model in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(function(X), X * 1.5)


def test_a_backward_audit_of_a_clean_model_leaves_decode_out_and_says_so(tmp_path, capsys):
    page = tmp_path / "page.html"
    command = ["audit", "qwen3-tiny", "--enable", "--backward", "--quiet", "--shape", "2x6"]
    code = main.main([*command, "--html", str(page), "--orders", "0"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    left = "a cached call has no backward pass"
    assert f"decode: left out, {left}" in printed
    assert f"left out: {left}" in page.read_text()
    assert main.main([*command, "--vary", "decode"]) == 2
    assert f"decode: not audited, {left}" in capsys.readouterr().out
