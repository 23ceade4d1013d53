"""What `Gradients` cannot keep is refused by name, in each dtype, reducer and micro-batch; its remedy then works.

1. Gradients that are not one operator's, of the share's samples: refused, and the next step has the right bits.
2. What looks alike and is right goes on working: frozen parameters, evaluation, checkpointing, tied modules.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import isobit
from isobit import Samples, UnsupportedError, bits
from isobit.parallel import GlobalBatch, Gradients
from isobit.simulator import World
from tests.attacks.small_net import (
    DTYPES,
    OF,
    REDUCERS,
    TOKENS,
    WIDTH,
    Net,
    alone,
    micro_batch,
    read,
    tokens,
)

# ---- 1. refused ------------------------------------------------------------------------------------------------

WRONG = {
    "no samples": "a call without samples=",
    "samples of a whole batch": "samples 0 to 2 of 2, while",
    "a stock operator": "first.(weight|bias), to which a stock operator led",
    "a module called twice": "first.(weight|bias), to which several calls",
    "a stock operator beside isobit's": "first.weight, to which several calls, a stock operator",
    "a norm without samples": r"takes \[2, 3, 32\] as all 2 samples",
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.sweep(20)
def test_refused_at_every_micro_batch_and_the_next_step_is_right(wrong, reducer, dtype):
    ranks, micro_batches, wrap, order = REDUCERS[reducer]

    def run(_):
        net = Net(dtype)
        wrapped = wrap(net)
        gradients = Gradients(wrapped, GlobalBatch(OF, ranks, micro_batches, order))
        for last in range(micro_batches):
            for index in range(last):
                micro_batch(gradients, wrapped, index, dtype)
            with pytest.raises(UnsupportedError, match=WRONG[wrong]):
                micro_batch(gradients, wrapped, last, dtype, wrong)
        for index in range(micro_batches):
            micro_batch(gradients, wrapped, index, dtype)
        return read(net)

    assert set(World(ranks).run(run).values) == {alone(dtype)}


@pytest.mark.parametrize(
    "wrong", ["a stock operator", "a module called twice", "a stock operator beside isobit's"]
)
def test_refused_where_one_share_is_the_whole_batch(wrong):
    """So that no program works at one layout and is refused at the next."""
    net = Net(torch.bfloat16)
    gradients = Gradients(net, GlobalBatch(OF))
    with pytest.raises(UnsupportedError, match=WRONG[wrong]):
        micro_batch(gradients, net, 0, torch.bfloat16, wrong)
    micro_batch(gradients, net, 0, torch.bfloat16)
    assert read(net) == alone(torch.bfloat16)


def test_the_default_reading_is_right_where_one_share_is_the_whole_batch():
    """[8, T, K] are the 8 samples."""
    net = Net(torch.bfloat16)
    micro_batch(Gradients(net, GlobalBatch(OF)), net, 0, torch.bfloat16, "no samples")
    assert read(net) == alone(torch.bfloat16)


def test_all_samples_of_the_batch_in_one_micro_batch_are_refused():
    """Each sample would count once in every micro-batch."""
    layer = isobit.nn.Linear(WIDTH, WIDTH)
    x, gradients = (
        tokens(torch.float32).reshape(-1, WIDTH),
        Gradients(layer, GlobalBatch(OF, micro_batches=4)),
    )
    for count in (8, 4):
        samples = Samples.packed([TOKENS] * count, first=0, total=OF)
        with (
            pytest.raises(UnsupportedError, match=f"samples 0 to {count} of 8, while Share"),
            gradients.micro_batch(0),
        ):
            layer(x[: count * TOKENS], samples=samples)


def test_the_graph_of_another_micro_batch_is_refused():
    layer = isobit.nn.Linear(WIDTH, WIDTH)
    x, gradients = (
        tokens(torch.float32).reshape(-1, WIDTH),
        Gradients(layer, GlobalBatch(OF, micro_batches=2)),
    )
    kept = []
    with gradients.micro_batch(0) as share:
        samples = Samples.packed([TOKENS] * 4, first=share.first, total=share.total)
        loss = layer(x[: 4 * TOKENS], samples=samples).sum()
        kept.append(loss)
        loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="stock operator"), gradients.micro_batch(1):
        kept[0].backward()


@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_hook_that_changes_a_gradient_is_refused(registered):
    """Clipping each share's gradient by itself depends on the layout; a hook that only looks does not."""
    seen = []
    layer = isobit.nn.Linear(WIDTH, WIDTH)
    hooks = [seen.append, lambda grad: grad.clamp(-1, 1)]
    handles = [layer.weight.register_hook(hook) for hook in hooks if registered == "before"]
    gradients = Gradients(layer, GlobalBatch(OF, micro_batches=2))
    handles += [layer.weight.register_hook(hook) for hook in hooks if registered == "after"]

    def step(index):
        with gradients.micro_batch(index) as share:
            samples = Samples.packed([TOKENS] * 4, first=share.first, total=OF)
            layer(tokens(torch.float32)[:4].reshape(-1, WIDTH), samples=samples).sum().backward()

    with pytest.raises(UnsupportedError, match="the gradient of weight"):
        step(0)
    handles[1].remove()
    step(0)
    step(1)
    assert len(seen) == 3


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch's own, of what follows a disabled function
def test_compiled_code_is_refused_and_runs_where_it_is_not_compiled():
    layer = isobit.nn.Linear(WIDTH, WIDTH)
    gradients = Gradients(layer, GlobalBatch(OF, micro_batches=2))
    x, samples = (
        tokens(torch.float32)[:4].reshape(-1, WIDTH),
        Samples.packed([TOKENS] * 4, first=0, total=OF),
    )
    compiled = torch.compile(lambda: layer(x, samples=samples), backend="eager")
    with (
        pytest.raises(UnsupportedError, match=r"torch\.compiler\.disable"),
        gradients.micro_batch(0),
    ):
        compiled()
    eager = torch.compiler.disable(lambda: layer(x, samples=samples))
    compiled = torch.compile(lambda: eager() * 2, backend="eager")
    with gradients.micro_batch(0):
        compiled().sum().backward()


@pytest.mark.parametrize(
    "function", ["embedding", "layer_norm", "linear_group", "linear_logprob", "rms_norm"]
)
def test_every_operator_with_parameters_asks_for_samples(function):
    weight = nn.Parameter(torch.randn(WIDTH) if "norm" in function else torch.randn(WIDTH, WIDTH))
    x, ids = torch.randn(2, TOKENS, WIDTH), torch.randint(0, WIDTH, (2, TOKENS))
    calls = {
        "embedding": lambda samples: isobit.embedding(ids, weight, samples=samples),
        "layer_norm": lambda samples: isobit.layer_norm(x, weight, samples=samples),
        "linear_group": lambda samples: isobit.linear_group(x, [weight], samples=samples)[0],
        "linear_logprob": lambda samples: isobit.linear_logprob(x, weight, ids, samples=samples),
        "rms_norm": lambda samples: isobit.rms_norm(x, weight, samples=samples),
    }
    model = nn.Module()
    model.weight = weight
    gradients = Gradients(model, GlobalBatch(OF, micro_batches=4))
    for index in range(4):
        for last in range(index):
            with gradients.micro_batch(last) as share:
                calls[function](
                    Samples.packed([TOKENS] * 2, first=share.first, total=OF)
                ).sum().backward()
        with (
            pytest.raises(UnsupportedError, match="samples=") as refusal,
            gradients.micro_batch(index),
        ):
            calls[function](None)
        assert "first=share.first, total=share.total" in str(refusal.value)


# ---- 2. accepted -----------------------------------------------------------------------------------------------


def digest_of(model, micro_batches, call):
    batch = GlobalBatch(OF, micro_batches=micro_batches)
    gradients = Gradients(model, batch)
    for index in range(micro_batches):
        with gradients.micro_batch(index) as share:
            samples = Samples.packed([TOKENS] * batch.size, first=share.first, total=OF)
            x = tokens(torch.bfloat16)[share.first : share.first + batch.size].reshape(-1, WIDTH)
            call(x, samples).float().square().sum().backward()
    gradients.close()
    return bits.digest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_evaluation_inside_and_between_micro_batches_is_free():
    def run(micro_batches, evaluates):
        net = Net(torch.bfloat16)

        def call(x, samples):
            with torch.no_grad():
                for _ in range(2 * evaluates):
                    net(x, None)
            found = net(x, samples)
            with torch.inference_mode():
                net(x[:1], None)
            return found

        return digest_of(net, micro_batches, call)

    assert {run(1, False), run(4, True), run(4, False)} == {run(8, True)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_a_second_call(reentrant):
    def run(micro_batches):
        net = Net(torch.bfloat16)
        return digest_of(
            net,
            micro_batches,
            lambda x, samples: checkpoint(
                net, x.requires_grad_(), samples, use_reentrant=reentrant
            ),
        )

    net = Net(torch.bfloat16)
    assert {run(1), run(4)} == {digest_of(net, 2, net)}


def test_frozen_layers_need_no_samples():
    def run(micro_batches):
        net = Net(torch.bfloat16)
        net.first.requires_grad_(False)
        net.norm.requires_grad_(False)
        return digest_of(
            net, micro_batches, lambda x, s: net.second(isobit.rms_norm(net.first(x), net.norm), s)
        )

    assert run(1) == run(8)


def test_a_module_for_each_call_that_shares_the_weight():
    """The remedy of a module called twice."""

    def run(micro_batches):
        torch.manual_seed(0)
        one, two = (isobit.nn.Linear(WIDTH, WIDTH, bias=False).bfloat16() for _ in range(2))
        two.weight = one.weight
        return digest_of(nn.ModuleList([one, two]), micro_batches, lambda x, s: two(one(x, s), s))

    assert len({run(1), run(2), run(8)}) == 1


def test_a_plain_backward_outside_a_micro_batch_is_the_callers_own():
    layer = isobit.nn.Linear(WIDTH, WIDTH)
    Gradients(layer, GlobalBatch(OF, micro_batches=2))
    (
        layer(tokens(torch.float32)).sum() + F.linear(tokens(torch.float32), layer.weight).sum()
    ).backward()
    assert layer.weight.grad is not None


def test_static_graph_is_refused_by_name():
    def run(_):
        with pytest.raises(UnsupportedError, match="static_graph=True"):
            Gradients(
                DistributedDataParallel(Net(torch.float32), static_graph=True), GlobalBatch(OF, 2)
            )

    World(2).run(run)
