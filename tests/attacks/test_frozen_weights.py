"""A frozen weight is packed anew after every write that torch makes: one that a lazy clone follows, one of another
thread while the weight is packed, and one to memory that torch.load made, included. Copies are not frozen.
"""

import copy
import ctypes
import io
import pickle
import threading

import pytest
import torch

import isobit
from isobit import bits
from isobit.nn.linear import read_weight
from isobit.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.has_native(), reason="no native kernels")

X = torch.ones(3, 300)


def layer():
    return isobit.nn.Linear(300, 33, bias=False)


def is_current(module):
    with torch.no_grad():
        return bits.equal(module(X), isobit.linear(X, module.weight.clone()))


def add(weight):
    weight.data.add_(1)


def copy_in(weight):
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight))


def through_a_view(weight):
    weight.detach()[3].fill_(2.0)


def through_numpy(weight):
    weight.detach().numpy()[5] = 7.0


@pytest.mark.parametrize("write", [add, copy_in, through_a_view, through_numpy])
@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "kept"])
def test_a_lazy_clone_does_not_hide_a_write(write, dropped):
    module = layer()
    with isobit.freeze(module):
        for _ in range(3):
            write(module.weight)
            clone = torch._lazy_clone(module.weight.detach())
            if dropped:
                del clone
            assert is_current(module)


def test_a_lazy_clone_alone_is_no_write():
    module = layer()
    with isobit.freeze(module):
        repacks = module.__dict__["_isobit_packed"].repacks
        kept = [torch._lazy_clone(module.weight.detach()) for _ in range(3)]
        assert is_current(module)
        assert module.__dict__["_isobit_packed"].repacks == repacks
        kept[0].add_(1)  # the clone's own memory
        assert is_current(module)
        assert module.__dict__["_isobit_packed"].repacks == repacks


def test_the_old_memory_is_free_after_the_next_call_and_after_thaw():
    module = layer()
    frozen = isobit.freeze(module)
    packed = module.__dict__["_isobit_packed"]
    module.weight.data.add_(1)
    assert is_current(module)
    address = torch._C._data_address(packed._snapshot.guard)
    assert address == torch._C._data_address(module.weight)
    frozen.thaw()
    del packed
    address = torch._C._data_address(module.weight)
    module.weight.data.add_(1)  # the last owner writes in place
    assert torch._C._data_address(module.weight) == address


def storage_held(weight):
    return weight.untyped_storage()


def view_held(weight):
    return weight.data[:3]


def array_held(weight):
    return weight.detach().numpy()


def test_a_storage_object_that_nobody_refers_to_is_no_owner():
    module = layer()
    storage_held(module.weight)  # what saving a model does
    with isobit.freeze(module):
        assert is_current(module)
        storage_held(module.weight)
        module.weight.data.add_(1)
        repacks = module.__dict__["_isobit_packed"].repacks
        assert is_current(module)
        assert module.__dict__["_isobit_packed"].repacks == repacks + 1


@pytest.mark.parametrize("hold", [storage_held, view_held, array_held])
def test_memory_that_others_refer_to_is_not_frozen(hold):
    module = layer()
    held = hold(module.weight)
    with pytest.raises(isobit.ArgumentError, match="owners"):
        isobit.freeze(module)
    del held
    with isobit.freeze(module):
        assert is_current(module)


# ---- other threads: [Note: weights that another thread writes] in ops/linear/packed.py ------------------------


@pytest.mark.parametrize("write", [add, copy_in, through_a_view])
def test_a_write_that_comes_while_the_weight_is_packed_is_seen(write, monkeypatch):
    module, pack = layer(), torch.ops.isobit.pack_weight
    pending = [write]

    def pack_while_another_thread_writes(weight):
        packed = pack(weight)
        if pending:
            thread = threading.Thread(target=pending.pop(), args=(module.weight,))
            thread.start()
            thread.join()
        return packed

    with isobit.freeze(module):
        add(module.weight)
        monkeypatch.setattr(torch.ops.isobit, "pack_weight", pack_while_another_thread_writes)
        with torch.no_grad():
            module(X)
        assert not pending
        assert is_current(module)


def write_to(address, like):
    """Write as an operator goes on to that asked for the address before."""
    values = torch.full_like(like, 3.0)
    ctypes.memmove(address, values.data_ptr(), values.nbytes)


def test_a_write_under_way_when_the_weight_is_packed_is_seen_once_it_has_ended():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        address = module.weight.data_ptr()  # an operator on the parameter itself begins to write,
        module(X)  # another thread packs,
        write_to(address, module.weight)  # the operator goes on,
        torch.autograd.graph.increment_version(module.weight)  # and ends
        assert is_current(module)
        assert is_current(module)


def test_a_write_through_an_alias_that_is_under_way_is_not_packed():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        alias = module.weight.data
        address = alias.data_ptr()
        module(X)
        write_to(address, module.weight)
        assert is_current(module)
        del alias
        assert is_current(module)


def test_a_call_that_is_slow_keeps_the_memory_that_it_reads():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        read = isobit.nn.linear.read_weight(module)
        before = read.weight.clone()
        for _ in range(3):  # writes, and calls of other threads, which drop older snapshots
            add(module.weight)
            module(X)
        assert bits.equal(read.weight, before)


def copy_from(module, new):
    with torch.no_grad():
        module.weight.copy_(new)


def copy_data(module, new):
    module.weight.data.copy_(new)


def load(module, new):
    module.load_state_dict({"weight": new})


def assign(module, new):
    module.load_state_dict({"weight": new.clone()}, assign=True)


def replace_data(module, new):
    module.weight.data = new.clone()


@pytest.mark.parametrize("sync", [copy_from, copy_data, load, assign, replace_data])
def test_inference_threads_see_the_weights_that_a_writer_sends(sync):
    """Three threads call while one writes; then each call has the last weight, and none a mixture where a weight is
    replaced."""
    module = isobit.nn.Linear(256, 512, bias=False)
    x = torch.ones(2, 256)
    weights = [torch.full((512, 256), float(version)) for version in range(1, 7)]
    whole = [isobit.linear(x, weight) for weight in weights]
    seen, errors, done = [], [], threading.Event()

    def infer():
        try:
            while not done.is_set():
                with torch.no_grad():
                    seen.append(module(x))
        except Exception as error:  # raised again below
            errors.append(error)

    sync(module, weights[0])
    with isobit.freeze(module):
        readers = [threading.Thread(target=infer) for _ in range(3)]
        for reader in readers:
            reader.start()
        for weight in weights * 4:
            sync(module, weight)
        done.set()
        for reader in readers:
            reader.join()
        with torch.no_grad():
            last = [module(x) for _ in range(3)]
    assert not errors
    assert seen
    assert all(bits.equal(found, whole[-1]) for found in last)
    if sync in (assign, replace_data):
        assert all(any(bits.equal(found, one) for one in whole) for found in seen)


def test_a_call_without_a_snapshot_keeps_the_memory_that_it_reads():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        other = (
            module.weight.data
        )  # an owner: the next write cannot be shared, so nothing is packed
        module.weight.mul_(2)
        first = read_weight(module).weight
        expected = first.clone()
        module.weight.data = torch.zeros_like(other)
        del other
        assert first is not module.weight
        assert bits.equal(first, expected)
        assert not module(X).any()


def test_calls_do_not_keep_each_other_from_packing():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        other = module.weight.data
        module.weight.mul_(2)
        alias = read_weight(module).weight
        assert alias.data_ptr() == module.weight.data_ptr()
        del other
        own = read_weight(module).weight
        assert own.data_ptr() != alias.data_ptr()
        assert bits.equal(own, alias)
        del alias
        assert read_weight(module).packed is not None


# ---- memory of torch.load, and copies -------------------------------------------------------------------------


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


def test_a_weight_that_torch_load_made_can_be_frozen_and_written():
    module = layer()
    module.load_state_dict(torch.load(saved(layer().state_dict())), assign=True)
    with isobit.freeze(module):
        for write in (add, copy_in, through_a_view, through_numpy):
            assert is_current(module)
            write(module.weight)
        assert is_current(module)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: torch.load(saved(module), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_a_frozen_layer_is_not_frozen(copied):
    module = layer()
    frozen = isobit.freeze(module)
    made = copied(module)
    assert made.__dict__["_isobit_packed"] is None
    add(made.weight)
    assert is_current(made)
    own = isobit.freeze(made)
    assert own.nbytes == frozen.nbytes
    add(made.weight)
    assert is_current(made)
    own.thaw()
    assert "_isobit_packed" not in made.__dict__
    assert module.__dict__["_isobit_packed"].nbytes == frozen.nbytes > 0
    assert is_current(module)


def test_a_shallow_copy_is_thawed_with_the_layer():
    module = layer()
    with isobit.freeze(module):
        made = copy.copy(module)
        assert is_current(made)
    address = torch._C._data_address(module.weight)
    assert is_current(made)
    add(module.weight)  # the copy keeps no memory
    assert torch._C._data_address(module.weight) == address
    assert is_current(made)


# ---- weights that are no plain memory -------------------------------------------------------------------------


def test_wrapped_and_negated_weights_are_read_themselves():
    module = layer()
    with isobit.freeze(module), torch.no_grad():
        weight = module.weight.detach().clone()
        negated = torch._neg_view(weight)
        found = torch.func.functional_call(module, {"weight": negated}, (X,))
        assert bits.equal(found, isobit.linear(X, -weight))
        assert is_current(module)
        module.weight.data = torch._neg_view(module.weight.data)
        assert is_current(module)
