"""No way to read a pending result on the host is silent, and the list of ways is closed.

Theorem: every attribute of torch.Tensor is an operator of aten, or in one of three sets; every member of the sets that
read is called on a result before `wait()` and is reported, and after `wait()` is not.
"""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import PendingError
from isobit.simulator import World
from isobit.simulator.checkers.pending_buffers import BY_OPERATORS, DESCRIPTIONS, DOORS

pytestmark = pytest.mark.filterwarnings("ignore")
WAYS = {
    "__array__": lambda x: np.asarray(x),
    "__deepcopy__": copy.deepcopy,
    "__dlpack__": np.from_dlpack,
    "__format__": lambda x: f"{x}",
    "__reduce_ex__": pickle.dumps,
    "_reduce_ex_internal": lambda x: x._reduce_ex_internal(2),
    "__repr__": repr,
    "__str__": str,
    "_typed_storage": lambda x: x._typed_storage(),
    "apply_": lambda x: x.apply_(lambda value: value),
    "const_data_ptr": lambda x: x.const_data_ptr(),
    "data_ptr": lambda x: x.data_ptr(),
    "map_": lambda x: x.map_(x, max),
    "map2_": lambda x: x.map2_(x, x, max),
    "numpy": lambda x: x.numpy(),
    "share_memory_": lambda x: x.share_memory_(),
    "storage": lambda x: x.storage(),
    "tolist": lambda x: x.tolist(),
    "untyped_storage": lambda x: bytes(x.untyped_storage()),
}
MORE = {
    "torch.save": lambda x: torch.save({"x": x}, io.BytesIO()),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "from_dlpack": lambda x: torch.from_dlpack(x).sum(),
    "torch.tensor of a list": lambda x: torch.tensor([x[0], x[1]]),
    "new_tensor of a list": lambda x: x.new_tensor([x[0]]),
    "view.tolist": lambda x: x[1:3].tolist(),
    "detached numpy": lambda x: x.detach().numpy(),
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x.long()[0]),
    "complex": lambda x: complex(x[0]),
    "index": lambda x: x.long()[0].__index__(),
    "in": lambda x: 1.0 in x,
    "copy_ into the host's": lambda x: torch.empty(4).copy_(x),
    "format of a scalar": lambda x: f"{x[0]:.3f}",
    "numpy's function": lambda x: np.add(x, 1),
    "unique": lambda x: x.unique(),
    "a cast": lambda x: x.half(),
    "equal": lambda x: torch.equal(x, torch.ones(4)),
    "max": max,
}


def read(way, when, accelerator=""):
    """Return the kinds of findings if rank 1 reads a result before or after its wait."""

    def program(rank):
        total = torch.full((4,), 1.0 + rank, device=accelerator or "cpu")
        work = dist.all_reduce(total, async_op=True)
        if rank == 1 and when == "before":
            way(total)
        work.wait()
        if rank == 1 and when == "after":
            way(total)

    result = World(2, watch=("reads",), strict=False, accelerator=accelerator).run(program)
    return [(found.kind, found.ranks) for found in result.findings]


@pytest.mark.parametrize("name", [*WAYS, *MORE])
def test_every_way_is_reported_before_wait_and_silent_after(name):
    way = {**WAYS, **MORE}[name]
    assert ("pending", (1,)) in read(way, "before")
    assert read(way, "after") == []


def test_every_door_has_a_test():
    assert set(WAYS) == DOORS


def test_every_attribute_of_a_tensor_is_in_a_list():
    """A new version of torch with a new method fails here, until someone has looked whether it reads memory."""
    operators = {
        name.removeprefix("aten::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    attributes = set(dir(Tensor)) - {"__slotnames__"}  # which copyreg adds
    listed = DOORS | BY_OPERATORS | DESCRIPTIONS
    assert attributes - operators - listed == set()
    assert listed - attributes == set()
    assert not DOORS & BY_OPERATORS
    assert not (DOORS | BY_OPERATORS) & DESCRIPTIONS


def test_copies_from_a_device_and_hooks_of_a_backward_pass():
    assert read(lambda x: x.cpu(), "before", "cuda") == [("pending", (1,))]
    assert read(lambda x: x.cpu(), "after", "cuda") == []

    def program(rank, early):
        total = torch.ones(2)
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(lambda gradient: total.tolist() and None)
        work = dist.all_reduce(total, async_op=True)
        if not early:
            work.wait()
        (weight * 2).sum().backward()
        work.wait()

    World(2, watch=("reads",)).run(program, False)
    with pytest.raises(PendingError, match=r"Tensor\.tolist"):
        World(2, watch=("reads",)).run(program, True)


def test_copies_of_the_handle_and_torchs_own_questions_are_no_reads():
    def program(rank):
        total = torch.ones(4)
        work = dist.all_reduce(total, async_op=True)
        copy.copy(total)
        assert total[1:].shape == (3,)
        work.wait()

    World(2, watch=("reads",)).run(program)
