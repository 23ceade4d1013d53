"""A frozen weight is packed anew after every write that torch makes, a write that a lazy clone follows included."""

import pytest
import torch

import isobit
from isobit import bits
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


def copy(weight):
    with torch.no_grad():
        weight.copy_(torch.ones_like(weight))


def through_a_view(weight):
    weight.detach()[3].fill_(2.0)


def through_numpy(weight):
    weight.detach().numpy()[5] = 7.0


@pytest.mark.parametrize("write", [add, copy, through_a_view, through_numpy])
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
    assert torch._C._data_address(packed._kept) == torch._C._data_address(module.weight)
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
